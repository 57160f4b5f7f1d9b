"""What torch's flight recorder knows of a rank's collectives, written down when the rank is asked for it by a signal.

A rank that hangs is in a native call of its main thread, where no Python handler of a signal runs. So a thread waits
for the signal, which is blocked everywhere else. torch keeps the record for every backend, where `TORCH_FR_BUFFER_SIZE`
is set before the first collective (``torch/csrc/distributed/c10d/FlightRecorder.hpp``); what it does not record under
gloo is `send` and `recv`. Which ranks a group has, the record does not tell either, and is added.
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

from pytest_accel.core.clock import monotonic
from pytest_accel.core.signals import FLIGHT_SIGNAL

SIZE = {"TORCH_FR_BUFFER_SIZE": "64"}
"""Collectives that are remembered, by torch's own variable: more than a person would read."""
THREAD = "accel-flight"


def prepare() -> None:
    """Called in a rank before it has a second thread: those that have the signal unblocked would be ended by it."""
    if FLIGHT_SIGNAL is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})


def watch(path: str, record: Callable[[], dict[str, object]]) -> None:
    """Write the record to the file `path` whenever the signal comes. Called once, when torch is imported.

    `record` gives what is to be written, and runs in the thread that waits for the signal.
    """
    if FLIGHT_SIGNAL is None:
        return
    Thread(target=_write_when_asked, args=(path, FLIGHT_SIGNAL, record), name=THREAD, daemon=True).start()


def _write_when_asked(path: str, number: int, record: Callable[[], dict[str, object]]) -> None:
    while True:
        sigwait({number})
        # No test is to blame for what goes wrong here, and there is nobody who could be told.
        with contextlib.suppress(Exception):
            draft = Path(f"{path}.new")
            draft.write_text(dumps(record()), encoding="utf-8")
            draft.replace(path)


def take_records(pids: Mapping[int, int], paths: Mapping[int, str], patience: float = 1.0) -> dict[int, bytes]:
    """The records of the ranks `pids`, of those that answer within `patience` seconds."""
    if FLIGHT_SIGNAL is None:
        return {}
    asked: list[int] = []
    for rank, pid in pids.items():
        Path(paths[rank]).unlink(missing_ok=True)
        if _waits_for_it(pid, FLIGHT_SIGNAL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, FLIGHT_SIGNAL)
                asked.append(rank)
    deadline = monotonic() + patience
    while not all(os.path.exists(paths[rank]) for rank in asked) and monotonic() < deadline:
        time.sleep(0.01)
    found: dict[int, bytes] = {}
    for rank in asked:
        with contextlib.suppress(OSError):
            found[rank] = Path(paths[rank]).read_bytes()
    return found


def _waits_for_it(pid: int, number: int) -> bool:
    """Whether the process has the signal blocked: one that has not started to wait for it would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    blocked = next((line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")), "0")
    return bool(int(blocked, 16) >> (number - 1) & 1)
