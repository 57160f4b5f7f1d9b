"""The record of torch's flight recorder about a rank's collectives, which the rank writes to a file on a signal.

If a rank hangs, its main thread is in a native call, where Python signal handlers do not run. So a thread of the rank
waits for the signal, which is blocked in all others. torch records collectives of every backend if
`TORCH_FR_BUFFER_SIZE` is set before the first one (``torch/csrc/distributed/c10d/FlightRecorder.hpp``). It does not
record `send` and `recv` of gloo, nor the ranks of a group, so the rank adds the latter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from json import dumps
from pathlib import Path
from signal import sigwait
from threading import Thread

from pytest_accel.core.signals import FLIGHT_SIGNAL

VARIABLES = {"TORCH_FR_BUFFER_SIZE": "64"}
"""torch's variable that enables the record. The value, the number of collectives to keep, is more than anyone reads."""


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
