"""The record of torch's flight recorder about a rank's collectives, which the rank writes to a file on a signal.

If a rank hangs, its main thread is in a native call, where Python signal handlers do not run. So a thread of the rank
waits for the signal, which is blocked in all others. torch records collectives of every backend if
`TORCH_FR_BUFFER_SIZE` is set before the first one (``torch/csrc/distributed/c10d/FlightRecorder.hpp``). It does not
record `send` and `recv` of gloo, nor the ranks of a group, so the rank adds the latter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from json import dumps
from pathlib import Path
from signal import sigwait
from threading import Thread

from pytest_accel.core.at_work import held_up
from pytest_accel.core.clock import monotonic
from pytest_accel.core.signals import FLIGHT_SIGNAL

VARIABLES = {"TORCH_FR_BUFFER_SIZE": "64"}
"""torch's variable that enables the record. The value, the number of collectives to keep, is more than anyone reads."""
_LONGEST = 10.0
"""Seconds that a rank has to write its record while it waits for a processor."""


def prepare() -> None:
    """Block the signal, which would terminate this process. Call this before the process has a second thread."""
    if FLIGHT_SIGNAL is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})


def watch(path: str, record: Callable[[], dict[str, object]]) -> None:
    """Start a thread that writes the record to the file `path` whenever the signal arrives. Call this once.

    The thread calls `record` for the data to write.
    """
    if FLIGHT_SIGNAL is None:
        return
    Thread(target=_write_on_signal, args=(path, FLIGHT_SIGNAL, record), name="accel-flight", daemon=True).start()


def _write_on_signal(path: str, number: int, record: Callable[[], dict[str, object]]) -> None:
    while True:
        sigwait({number})
        # An error here must not fail a test, and there is no way to report it. The record is missing then.
        with contextlib.suppress(Exception):
            draft = Path(f"{path}.new")
            draft.write_text(dumps(record()), encoding="utf-8")
            draft.replace(path)


def take_records(pids: Mapping[int, int], paths: Mapping[int, str], timeout: float = 2.0) -> dict[int, bytes]:
    """Signal the ranks with process ids `pids`; return the records that they write within `timeout` seconds.

    A rank that waits for a processor has longer.
    """
    if FLIGHT_SIGNAL is None:
        return {}
    signalled: list[int] = []
    for rank, pid in pids.items():
        Path(paths[rank]).unlink(missing_ok=True)
        if _blocks(pid, FLIGHT_SIGNAL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, FLIGHT_SIGNAL)
                signalled.append(rank)
    began = monotonic()
    while missing := [rank for rank in signalled if not os.path.exists(paths[rank])]:
        passed = monotonic() - began
        if passed >= timeout and (passed >= _LONGEST or not held_up(pids[rank] for rank in missing)):
            break
        time.sleep(0.01)
    found: dict[int, bytes] = {}
    for rank in signalled:
        with contextlib.suppress(OSError):
            found[rank] = Path(paths[rank]).read_bytes()
    return found


def _blocks(pid: int, number: int) -> bool:
    """Return whether the process has blocked the signal. The signal would terminate a process that has not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    blocked = next((line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")), "0")
    return bool(int(blocked, 16) >> (number - 1) & 1)
