"""Tests of `leftovers`: how long what a test leaves running may take to end by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_accel.messages.rank_messages import LeakKind
from pytest_accel.rank import leftovers

_COMPUTES = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass"


@pytest.mark.parametrize("prefix", [[], ["sh", "-c", '"$@"; true', "sh"]], ids=["itself", "in a shell"])
def test_a_process_that_runs_code_is_given_time_to_end(monkeypatch: pytest.MonkeyPatch, prefix: list[str]) -> None:
    monkeypatch.setattr(leftovers, "_LONGEST_GRACE", 60.0)
    known = leftovers.find()
    with subprocess.Popen([*prefix, sys.executable, "-c", _COMPUTES.format(0.5)]) as child:
        assert leftovers.left_running(leftovers.find() - known) == []
    assert child.returncode == 0


def test_a_warning_filter_that_names_a_library_does_not_hide_a_process() -> None:
    known = leftovers.find()
    command = [
        sys.executable,
        "-Wignore::UserWarning:multiprocessing.resource_tracker",
        "-W",
        "ignore::UserWarning:loky.backend.x",
    ]
    with subprocess.Popen([*command, "-c", "input()"], stdin=subprocess.PIPE) as child:
        [leftover] = leftovers.left_running(leftovers.find() - known)
    assert (leftover.kind, leftover.number) == (LeakKind.PROCESS, child.pid)
