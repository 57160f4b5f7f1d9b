"""The present state of a session for the person at the terminal. Registered in the controller if tests have marks.

`SIGUSR1` shows the running tests, the places of their ranks, and the waiting tests. So does Ctrl-T on systems where it
sends `SIGINFO`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.record_events import PhaseReported, TestStarted
from pytest_accel.core.shims import worker_of_starting_test
from pytest_accel.core.terminal_file import TerminalFile
from pytest_accel.core.units import count_text
from pytest_accel.pool.pool_client import waiting_text
from pytest_accel.record.live_state import LiveState, RunningTest
from pytest_accel.verdict.report_text import place_parts

if TYPE_CHECKING:
    from pytest_accel.pool.pool import Pool
    from pytest_accel.session import AccelSession

_SIGNALS: tuple[int, ...] = tuple(
    number for name in ("SIGUSR1", "SIGINFO") if (number := getattr(signal, name, None)) is not None
)
PLUGIN = "accel-live"
"""Name of the plugin with the hooks."""


def register(session: AccelSession) -> None:
    """Register the hooks, unless that has been done. Call this in the controller, while nothing is captured."""
    plugins = session.config.pluginmanager
    if plugins.has_plugin(PLUGIN) or not plugins.has_plugin("terminalreporter"):
        return
    with contextlib.suppress(OSError):  # The output has no descriptor: it is not that of a process.
        plugins.register(LiveHooks(session, TerminalFile(session.config)), PLUGIN)


class LiveHooks:
    """Follows the tests, and shows the state of the session on request, from a thread of its own."""

    def __init__(self, session: AccelSession, terminal: TerminalFile) -> None:
        self._pool = session.pool
        self._events = session.events
        self._folder = str(session.config.invocation_params.dir)
        self._worker = worker_of_starting_test(session.config)
        self._terminal = terminal
        self._requests: SimpleQueue[bool] = SimpleQueue()
        """True: show the report. False: end the thread. A signal handler may put something into this kind of queue."""
        self._restore = _handle_signals(lambda: self._requests.put(True))
        self._thread = threading.Thread(target=self._run, name="accel-live", daemon=True)
        self._thread.start()
        self._stopped = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._events(TestStarted(nodeid, self._worker()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "context"):  # A subtest's report.
            worker = getattr(report, "worker_id", "")
            self._events(PhaseReported(report.nodeid, report.when, report.outcome, report.start, report.stop, worker))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._stop()

    def pytest_unconfigure(self) -> None:
        self._stop()  # The session may have ended before it started any test.

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._restore()
            self._requests.put(False)
            self._thread.join()
            self._terminal.remove()

    def _run(self) -> None:
        while self._requests.get():
            with contextlib.suppress(OSError):  # The terminal is closed.
                self._terminal.write_lines(report(self._events.state(), self._pool, monotonic(), self._folder))


def _handle_signals(on_signal: Callable[[], None]) -> Callable[[], None]:
    """Call `on_signal`, in the main thread, for each of `_SIGNALS` whose action is the default one.

    Return a function that restores the default. This does nothing outside of the main thread. Handlers are not passed
    on to programs that this process starts, such as the fork server.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def handle(number: int, frame: object) -> None:
        on_signal()

    taken = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL and not _is_caught(number)]
    for number in taken:
        signal.signal(number, handle)

    def restore() -> None:
        for number in taken:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)

    return restore


def _is_caught(number: int) -> bool:
    """Return whether this process has a handler for the signal, including one that Python does not know of.

    `faulthandler.register` installs such handlers. Without ``/proc``, the result is False.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def report(state: LiveState, pool: Pool, now: float, folder: str) -> list[str]:
    """Return the lines about the running and the waiting tests. Paths are relative to `folder`. This may take seconds.

    The reasons why tests wait are those of the `pool`: the holders of devices may have changed since the event.
    """
    requests = list(state.requests.values())
    waits = {one.number: pool.waiting(one.number) for one in requests}
    waiting = sum(text is not None for text in waits.values())
    parts = [f"{count_text(len(state.running), 'running test')}", f"{waiting} waiting"]
    if state.devices:
        parts.append(f"{state.devices_in_use} of {count_text(state.devices, 'device')} in use")
    lines = [f"accel: {', '.join(parts)}"]
    lines += [f"  {_about(one, pool, now, folder)}" for one in state.running.values()]
    for one in requests:
        text = waits[one.number] or f"{one.test} waits for the start of its ranks"
        lines.append(f"  {waiting_text(text, now - one.since)}")
    return lines


def _about(test: RunningTest, pool: Pool, now: float, folder: str) -> str:
    about = [*([test.worker] if test.worker else []), f"{now - test.since:.0f} s", test.phase]
    text = f"{test.test} ({', '.join(about)})"
    places, collectives = pool.places(test.world) if test.world else ({}, [])
    parts = place_parts({rank: place for rank, place in places.items() if place}, collectives, folder)
    if parts and (unknown := [rank for rank, place in places.items() if not place]):
        parts.append(f"{ranks_text(unknown)} in the {test.phase} phase")
    return f"{text}: {'; '.join(parts)}" if parts else text
