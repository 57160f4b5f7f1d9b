"""Debuggers in a rank. While one runs, the rank's standard streams are connected to the driver's terminal."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from os import close, dup2, getpid
from signal import SIG_DFL, SIGINT, default_int_handler
from signal import signal as set_handler
from socket import recv_fds, socket
from typing import Any

import pytest

from pytest_accel.compat.pytest_shims import ask_before_debugging, set_terminal_file, terminal_file
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.rank_messages import TerminalRequest
from pytest_accel.rank.link_to_driver import LinkToDriver
from pytest_accel.rank.rank_output import RankOutput


class RankDebugger:
    """Pytest plugin of a rank: requests the driver's terminal before a debugger starts, and returns it afterwards."""

    def __init__(self, listener: socket, output: RankOutput) -> None:
        self.driver: LinkToDriver | None = None
        """The driver of the running test, which can lend its terminal; None if no test runs."""
        self._listener = listener
        self._output = output
        self._pid = getpid()
        self._config: pytest.Config
        self._post_mortem: Any = None
        """pytest's plugin for ``--pdb``, which this object calls instead of pytest; None without ``--pdb``."""
        self._borrowed: ExitStack | None = None
        """Gives the driver's terminal back and undoes what was changed for it; None while the rank does not have it."""

    def install(self, config: pytest.Config) -> None:
        """Make every debugger that pytest starts request the terminal first."""
        self._config = config
        # pytest's plugin for --pdb prints the failure before it starts the debugger, in every rank. So it is called
        # only in a rank that has the terminal.
        use_pdb = getattr(config.option, "usepdb", False)
        self._post_mortem = config.pluginmanager.unregister(name="pdbinvoke") if use_pdb else None
        ask_before_debugging(self._take_terminal)

    @pytest.hookimpl
    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        if self._post_mortem is not None and self._take_terminal("post_mortem"):
            try:
                self._post_mortem.pytest_exception_interact(node, call, report)
            finally:
                self.end()

    @pytest.hookimpl
    def pytest_leave_pdb(self) -> None:
        self._return_terminal()

    def end(self) -> None:
        """Stop tracing and return the terminal at the end of a phase, where there is nothing left to step through."""
        if self._borrowed is not None:
            sys.settrace(None)
            self._return_terminal()

    def _take_terminal(self, method: str) -> bool:
        """Return whether a debugger may start; if so, connect the standard streams to the driver's terminal."""
        if self._borrowed is not None:
            return True
        if self.driver is None or getpid() != self._pid:
            return False  # Only the rank itself may use its link to the driver, no process that the test has forked.
        self.driver.send(TerminalRequest(method))
        with unix_sockets.accept(self._listener) as driver:
            _, lent, _, _ = recv_fds(driver, 1, 2)
        if not lent:
            return False
        manager = self._config.pluginmanager.getplugin("capturemanager")
        if manager is not None:
            manager.suspend(in_=True)
        _flush()
        self._borrowed = undo = ExitStack()  # The last callback is called first.
        undo.callback(self.driver.send, TerminalRequest(None))
        for number in lent:
            undo.callback(close, number)
        undo.callback(self._output.redirect)
        for number, source in ((0, lent[0]), (1, lent[1]), (2, lent[1])):
            dup2(source, number)
        if self._config.pluginmanager.has_plugin("terminalreporter"):
            shown, _ = terminal_file(self._config)
            undo.callback(set_terminal_file, self._config, shown)
            set_terminal_file(self._config, sys.__stdout__)
        undo.enter_context(suppress(ValueError))
        with suppress(ValueError):  # A thread other than the main one cannot set a handler.
            undo.callback(set_handler, SIGINT, set_handler(SIGINT, default_int_handler) or SIG_DFL)
        undo.callback(_flush)
        return True

    def _return_terminal(self) -> None:
        """Connect the standard streams as before, and tell the driver; no-op if the rank has no terminal."""
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is not None:
            borrowed.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
