"""The present state of a session for the person at the terminal. Registered in the controller if tests have marks.

`SIGUSR1` shows the running tests, the places of their ranks, and the waiting tests. So does Ctrl-T on systems where it
sends `SIGINFO`. At a terminal, a status line shows the same in short while pytest writes nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import environ
from pathlib import Path
from queue import Empty, SimpleQueue
from signal import SIG_DFL, getsignal
from signal import signal as set_handler
from threading import current_thread, main_thread
from traceback import format_exc
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core import threads
from pytest_accel.core.clock import monotonic
from pytest_accel.core.frames import Folders, folders_of
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.record_events import PhaseReported, TestStarted
from pytest_accel.core.shims import is_subtest, worker_of_starting_test
from pytest_accel.core.stash_keys import MARKED
from pytest_accel.core.units import count_text
from pytest_accel.diagnostics.diagnosis import Progress
from pytest_accel.features.order.test_demand import Demand, wanted_by
from pytest_accel.features.record.failed_subtests import FailedSubtests
from pytest_accel.features.record.live_state import LIVE_EVENTS, LiveState, RunningTest
from pytest_accel.features.record.terminal_file import TerminalFile
from pytest_accel.pool.pool_client import waiting_text
from pytest_accel.verdict.sentences import progress_parts

if TYPE_CHECKING:
    from pytest_accel.features.planning.forecast import SuiteOnMachine
    from pytest_accel.pool.pool import Pool
    from pytest_accel.session import AccelSession

_SIGNALS: tuple[int, ...] = tuple(
    number for name in ("SIGUSR1", "SIGINFO") if (number := getattr(signal, name, None)) is not None
)
QUIET = 2.0
"""Seconds without output after which the status line is shown: pytest's own progress is enough until then."""
REFRESH = 1.0
"""Seconds between two looks at the state for the status line."""
_PLUGIN = "accel-live"
"""Name of the plugin with the hooks."""


def register(session: AccelSession) -> LiveHooks | None:
    """Register the hooks, unless that has been done, and return them.

    Return None without a terminal reporter, if the output has no file descriptor, or if no thread can be started. Call
    this in the controller, while nothing is captured.
    """
    plugins = session.config.pluginmanager
    if not plugins.has_plugin(_PLUGIN) and plugins.has_plugin("terminalreporter"):
        with suppress(OSError, threads.NoThreadError):
            plugins.register(LiveHooks(session, TerminalFile(session.config)), _PLUGIN)
    return plugins.get_plugin(_PLUGIN)


class LiveHooks:
    """Follows the tests, and shows the state of the session from a thread of its own."""

    def __init__(self, session: AccelSession, terminal: TerminalFile) -> None:
        self._session = session
        _ = session.pool  # Making it makes the receiver of the events.
        self._events = session.config.stash[LIVE_EVENTS]
        self._worker = worker_of_starting_test(session.config)
        self._terminal = terminal
        self._has_status = _can_have_status(session.config)
        self._suite: SuiteOnMachine | None = None
        """The tests that the session is going to run, for an estimate of the time."""
        self._workers = 1
        self._failed_subtests = FailedSubtests()
        self._requests: SimpleQueue[bool] = SimpleQueue()
        """True: show the report. False: end the thread. A signal handler may put something into this kind of queue."""
        self._restore = _handle_signals(lambda: self._requests.put(True))
        self._stopped = False
        try:
            self._thread = threads.start(self._run, "accel-live")
        except threads.NoThreadError:
            self._restore()
            terminal.remove()
            raise

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the tests of a session without xdist."""
        found = [(item, item.stash.get(MARKED, None)) for item in session.items]
        tests = [item for item, marked in found if marked is None or marked.missing is None]
        self.expect([item.nodeid for item in tests], Demand.of(map(wanted_by, tests)), 1)

    def expect(self, collection: Sequence[str], demand: Demand, workers: int) -> None:
        """Note the tests that the session is going to run. Only the first call counts."""
        if not self._has_status or self._suite is not None:
            return
        from pytest_accel.features.order.stored_durations import recall
        from pytest_accel.features.planning.forecast import SuiteOnMachine, assumed_times

        tests = list(zip(collection, demand.kinds_of_tests(len(collection)), strict=True))
        times = assumed_times(recall(self._session.config), tests)
        self._suite = SuiteOnMachine(collection, demand, times, self._session.machine, self._session.machine.slots)
        self._workers = workers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._events(TestStarted(nodeid, self._worker()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if is_subtest(report):
            self._failed_subtests.add(report)
            return
        outcome = report.outcome if self._failed_subtests.pop(report) is None else "failed"
        worker = getattr(report, "worker_id", "")
        self._events(PhaseReported(report.nodeid, report.when, outcome, report.start, report.stop, worker))

    @pytest.hookimpl(tryfirst=True)
    def pytest_enter_pdb(self) -> None:
        self._terminal.erase_status(pause=True)

    def pytest_leave_pdb(self) -> None:
        self._terminal.resume()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._stop()

    def pytest_unconfigure(self) -> None:
        self._stop()  # The session may have ended before it started any test.

    def _stop(self) -> None:
        if not self._stopped and not self._session.is_forked_copy:
            self._stopped = True
            self._restore()
            self._requests.put(False)
            self._thread.join()
            self._terminal.remove()

    def _run(self) -> None:
        wanted = True
        while wanted:
            try:
                wanted = self._requests.get(timeout=REFRESH if self._has_status else None)
                if wanted:
                    self._show_report()
            except Empty:
                self._show_status()

    def _show_report(self) -> None:
        folders = folders_of(self._session.config)
        try:
            lines = report(self._events.state(), self._session.pool, monotonic(), folders)
        except Exception:  # The end of this thread with an error could fail the running test.
            lines = ["accel: the report has failed", *format_exc().splitlines()]
        self._terminal.write_lines(lines)

    def _show_status(self) -> None:
        if self._terminal.quiet_time < QUIET:
            return
        state, now = self._events.state(), monotonic()
        if not state.running and not state.requests:
            self._terminal.erase_status()
            return
        running = [(test.test, now - test.since) for test in state.running.values()]
        left = None if self._suite is None else self._suite.remaining(state.ended, running, self._workers)
        self._terminal.show_status(status(state, now, left))


def _can_have_status(config: pytest.Config) -> bool:
    """Return whether the output goes to a person at a terminal, who can see a line that is written again and again.

    Tests that write to the terminal would destroy the line, and a reporter of another plugin may have one of its own.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return (
        type(reporter) is pytest.TerminalReporter
        and bool(reporter.isatty)  # A method that is also a truth value; a plain one before pytest 9.
        and environ.get("TERM", "") not in ("", "dumb")
        and "CI" not in environ
        and config.get_verbosity() > -2
        and getattr(config.option, "capture", "no") != "no"
    )


def _handle_signals(on_signal: Callable[[], None]) -> Callable[[], None]:
    """Call `on_signal`, in the main thread, for each of `_SIGNALS` whose action is the default one.

    Return a function that restores the default. This does nothing outside of the main thread. Handlers are not passed
    on to programs that this process starts, such as the fork server.
    """
    if current_thread() is not main_thread():
        return lambda: None

    def handle(number: int, frame: object) -> None:
        on_signal()

    taken = [number for number in _SIGNALS if getsignal(number) is SIG_DFL and not _is_caught(number)]
    for number in taken:
        set_handler(number, handle)

    def restore() -> None:
        for number in taken:
            if getsignal(number) is handle:
                set_handler(number, SIG_DFL)

    return restore


def _is_caught(number: int) -> bool:
    """Return whether this process has a handler for the signal, including one that Python does not know of.

    `faulthandler.register` installs such handlers. Without ``/proc``, the result is False.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def report(state: LiveState, pool: Pool, now: float, folders: Folders) -> list[str]:
    """Return the lines about the running and the waiting tests. This may take seconds.

    The reasons why tests wait are those of the `pool`: the holders of devices may have changed since the event.
    """
    lines = [f"accel: {', '.join(_counts(state))}"]
    lines += [f"  {_about(one, pool, now, folders)}" for one in state.running.values()]
    for one in state.requests.values():
        text = pool.waiting(one.number) or f"{one.test} waits for the start of its ranks"
        lines.append(f"  {waiting_text(text, now - one.since)}")
    return lines


def status(state: LiveState, now: float, left: float | None) -> str:
    """Return the status line. `left` is the expected rest of the session in seconds; None if unknown."""
    parts = _counts(state)
    if waits := [now - one.since for one in state.requests.values()]:
        parts[1] += f" ({_duration(max(waits))})"
    return "accel: " + ", ".join([*parts, *([] if left is None else [f"about {_duration(left)} left"])])


def _counts(state: LiveState) -> list[str]:
    parts = [f"{len(state.running)} running", f"{len(state.requests)} waiting"]
    if state.devices:
        parts.append(f"{state.devices_in_use} of {count_text(state.devices, 'device')} in use")
    return parts


def _about(test: RunningTest, pool: Pool, now: float, folders: Folders) -> str:
    about = [*([test.worker] if test.worker else []), _duration(now - test.since), test.phase]
    text = f"{test.test} ({', '.join(about)})"
    ranks, progress = pool.progress(test.world) if test.world else ((), Progress())
    parts = progress_parts(progress, folders)
    if parts and (unknown := [rank for rank in ranks if rank not in progress.places]):
        parts.append(f"{ranks_text(unknown)} in the {test.phase} phase")
    return f"{text}: {'; '.join(parts)}" if parts else text


def _duration(seconds: float) -> str:
    """Return a duration like ``41 s``, ``12 min`` or ``3.1 h``."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7170 else f"{seconds / 3600:.1f} h"
