"""Tests of exit statuses, and of the tail of a log."""

from __future__ import annotations

import signal
import tracemalloc
from pathlib import Path

import pytest

from pytest_accel.core.truncation import tail
from pytest_accel.messages.rank_messages import ExitCause, RankExit, exited


@pytest.mark.parametrize(("status", "crash"), [(-signal.SIGSEGV, True), (-signal.SIGKILL, False), (11, False)])
def test_a_crash_is_an_exit_by_a_signal_of_the_fault_handler(status: int, crash: bool) -> None:
    assert exited(status).is_crash is crash
    assert not RankExit(ExitCause.MACHINE_LOST).is_crash


def test_tail_returns_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(str(log)) == ""
    log.write_bytes(b"\n".join([b"first", b"caf\xff", b"last", b"", b""]))
    assert tail(str(log)) == "first\ncaf\N{REPLACEMENT CHARACTER}\nlast"
    assert tail(str(log), 7) == "[… 10 bytes left out …]\n\nlast"
    assert tail(str(tmp_path)) == ""


def test_tail_reads_only_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(bytes(1 << 20) + b"\nlast\n")
    tracemalloc.start()
    try:
        assert tail(str(log), 6).endswith(" bytes left out …]\n\nlast")
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()
