"""Lending of the driver's terminal to a rank's debugger."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from os import isatty, kill
from signal import SIGINT, signal
from termios import TCSADRAIN, tcgetattr, tcsetattr

import pytest


@contextmanager
def lend_terminal(config: pytest.Config, pid: int) -> Iterator[tuple[int, int]]:
    """Yield the descriptors of this process's input and output for the process `pid`, and forward Ctrl-C to it.

    `pytest_enter_pdb` and `pytest_leave_pdb` are called, so that plugins with timeouts suspend them.
    """

    def forward(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            kill(pid, SIGINT)

    with ExitStack() as undo:
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:  # None with `-p no:capture`.
            undo.callback(capture.resume)
            capture.suspend(in_=True)
        sys.stdout.flush()
        if isatty(0):
            # A rank that died in its line editor may have left the terminal in raw mode.
            undo.callback(tcsetattr, 0, TCSADRAIN, tcgetattr(0))
        undo.callback(config.hook.pytest_leave_pdb, config=config, pdb=None)
        config.hook.pytest_enter_pdb(config=config, pdb=None)
        undo.callback(signal, SIGINT, signal(SIGINT, forward))
        yield 0, 1
