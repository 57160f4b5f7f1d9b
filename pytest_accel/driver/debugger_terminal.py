"""The terminal of a driver, free for a rank's debugger, and whether there is a person at it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
from collections.abc import Iterator

import pytest


def is_interactive(config: pytest.Config) -> bool:
    """Return whether the session's output goes to a terminal: in a worker, that of the controller."""
    if (given := getattr(config, "workerinput", None)) is not None:
        return bool(given["accel_terminal"])
    # Another plugin's reporter may be in its place, which need not have all of the attributes.
    return bool(getattr(config.pluginmanager.getplugin("terminalreporter"), "isatty", False))


@contextlib.contextmanager
def lent(config: pytest.Config, pid: int) -> Iterator[tuple[int, int]]:
    """Descriptors of this process's own input and output, for the process `pid`, which Ctrl-C goes to meanwhile.

    Plugins with clocks hear of a debugger, as they do of one in this process.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.suspend(in_=True)
    sys.stdout.flush()
    settings = termios.tcgetattr(0) if os.isatty(0) else None
    config.hook.pytest_enter_pdb(config=config, pdb=None)

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)

    before = signal.signal(signal.SIGINT, pass_on)
    try:
        yield 0, 1
    finally:
        signal.signal(signal.SIGINT, before)
        config.hook.pytest_leave_pdb(config=config, pdb=None)
        if settings is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, settings)  # A rank that died may have left it in its line editor's.
        capture.resume()
