"""The present state of a session for the person at the terminal. Registered in the controller if tests have marks.

`SIGUSR1` shows the running tests, the places of their ranks, and the waiting tests. So does Ctrl-T on systems where it
sends `SIGINFO`.
"""

from __future__ import annotations

import signal
from _thread import start_new_thread
from contextlib import suppress
from os import close, dup, write
from pathlib import Path
from signal import SIG_DFL, getsignal
from signal import signal as set_handler
from threading import Lock, current_thread, main_thread
from traceback import format_exc
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pytest_accel.compat.pytest_shims import is_subtest, terminal_file
from pytest_accel.compat.xdist_shims import worker_of_starting_test
from pytest_accel.core.clock import monotonic
from pytest_accel.core.frames import Folders, folders_of
from pytest_accel.core.threads import END_TIMEOUT
from pytest_accel.core.units import count_text
from pytest_accel.pool.pool import Pool, waiting_text
from pytest_accel.pool.worlds import WorldState
from pytest_accel.verdict.sentences import progress_parts

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession

_SIGNALS: list[int] = [getattr(signal, name) for name in ("SIGUSR1", "SIGINFO") if hasattr(signal, name)]
_PLUGIN = "accel-live"
"""Name of the plugin with the hooks."""


def register(session: AccelSession) -> None:
    """Register the hooks, unless that has been done. Call this in the controller, while nothing is captured.

    No-op without a terminal reporter, if the output has no file descriptor (that of xdist's ``--looponfail`` has none),
    or if a function that the suite has replaced raises.
    """
    plugins = session.config.pluginmanager
    if not plugins.has_plugin(_PLUGIN) and plugins.has_plugin("terminalreporter"):
        # A conftest may have replaced a function of the standard library by a function that raises.
        with suppress(Exception):
            plugins.register(LiveHooks(session, dup(terminal_file(session.config)[0].fileno())), _PLUGIN)


class LiveHooks:
    """Follows the tests, and shows the state of the session on a signal, from a thread that ends with the report."""

    def __init__(self, session: AccelSession, descriptor: int) -> None:
        """`descriptor` is a copy of the terminal's, which is closed at the end."""
        self._session = session
        self._worker = worker_of_starting_test(session.config)
        self._descriptor = descriptor
        self._running: dict[str, tuple[str, float, str]] = {}
        """By worker: its test, the begin of the test, and the phase. Without xdist, the only name is empty."""
        self._worker_of: dict[str, str] = {}
        """The worker that has started each test."""
        self._is_over = False
        self._showing = Lock()
        """Held while a thread shows a report."""
        in_main = current_thread() is main_thread()
        self._signals = [number for number in _SIGNALS if in_main and _is_free(number)]
        for number in self._signals:  # Programs that this process starts, such as the fork server, have no handler.
            set_handler(number, self._on_signal)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        worker = self._worker_of[nodeid] = self._worker()
        self._running[worker] = nodeid, monotonic(), "setup"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worker = getattr(report, "worker_id", self._worker_of.get(report.nodeid, ""))  # A crash does not name it.
        test, since, _ = self._running.get(worker, ("", 0.0, ""))
        if is_subtest(report) or test != report.nodeid:
            return
        self._running[worker] = test, since, "call" if report.when == "setup" and report.passed else "teardown"
        if report.when not in ("setup", "call"):
            del self._running[worker]

    def pytest_unconfigure(self) -> None:
        self.pytest_sessionfinish()  # The session may have ended before it started any test.

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if not self._is_over and not self._session.is_forked_copy:
            self._is_over = True
            for number in self._signals:
                if getsignal(number) == self._on_signal:
                    set_handler(number, SIG_DFL)
            if self._showing.acquire(timeout=END_TIMEOUT):  # Otherwise leave open what the thread may be using.
                close(self._descriptor)
                self._showing.release()

    def _on_signal(self, number: int, frame: object) -> None:
        # A start of `threading.Thread` takes a lock that the interrupted code may hold.
        with suppress(RuntimeError):  # This process cannot have more threads.
            start_new_thread(self._show, ())

    def _show(self) -> None:
        with self._showing:
            if not self._is_over and not self._session.is_forked_copy:
                self._write(self._report())

    def _write(self, lines: list[str]) -> None:
        """Write lines below the unfinished line of pytest, and repeat that below them.

        This bypasses pytest's capturing, which another thread must not suspend.
        """
        file, unfinished = terminal_file(self._session.config)
        text = "".join(["\n" if unfinished else "", *(f"{line}\n" for line in lines), unfinished])
        data = text.encode(file.encoding, "backslashreplace")
        with suppress(OSError):  # The terminal is closed, which pytest notices by itself.
            while data:
                data = data[write(self._descriptor, data) :]

    def _report(self) -> list[str]:
        """Return the lines about the running and the waiting tests. This may take seconds."""
        try:
            pool, now, running = self._session.pool, monotonic(), dict(self._running)
            state, folders = pool.call(_look, pool), folders_of(self._session.config)
            counts = f"{len(running)} running", f"{len(state.waiting)} waiting", state.in_use
            lines = [f"accel: {', '.join(filter(None, counts))}"]
            # A worker has at most one world, maybe requested for an earlier test.
            worlds = {self._worker_of[test]: world for test, world in state.worlds.items() if test in self._worker_of}
            for worker, (test, since, phase) in running.items():
                about = ", ".join(filter(None, (worker, f"{now - since:.0f} s", phase)))
                ranks = "; ".join(_progress(pool, worlds[worker], folders) if worker in worlds else ())
                lines.append(f"  {test} ({about}): {ranks}".removesuffix(": "))
            return [*lines, *(f"  {text}" for text in state.waiting)]
        except Exception:  # The end of this thread with an error could fail the running test.
            return ["accel: the report has failed", *format_exc().splitlines()]


def _is_free(number: int) -> bool:
    """Return whether a signal has its default action; without ``/proc``, as far as Python knows."""
    with suppress(OSError):  # Python does not know the handlers of `faulthandler.register`.
        caught = Path("/proc/self/status").read_text(encoding="utf-8").partition("SigCgt:")[2].split()[0]
        if int(caught, 16) >> (number - 1) & 1:
            return False
    return getsignal(number) is SIG_DFL


class _PoolState(NamedTuple):
    """The present state of a pool."""

    waiting: list[str]
    """The reason for which each request for a world still waits."""
    worlds: dict[str, int]
    """The number of each world that a driver has or will get, by the test for which it was requested."""
    in_use: str
    """The number of the devices of these worlds, and that of all devices; empty if no device is known."""


def _look(pool: Pool) -> _PoolState:
    """Return the present state, in the pool's thread."""
    now = monotonic()
    waiting = [
        waiting_text(one.waiting() or f"{one.demand.holder.test} waits for the start of its ranks", now - one.since)
        for one in pool.requests.values()
        if one.demand.key.ranks
    ]
    worlds = [one for one in pool.worlds.values() if one.state in (WorldState.STARTING, WorldState.IN_USE)]
    used = {
        (world.spec.machines[rank], device.id)
        for world in worlds
        for rank in range(world.spec.ranks)
        for device in world.spec.devices_of(rank)
    }
    of_tests = {one.request.demand.holder.test: one.spec.world for one in worlds if one.spec.ranks}
    in_use = f"{len(used)} of {count_text(len(pool.devices), 'device')} in use" if pool.devices else ""
    return _PoolState(waiting, of_tests, in_use)


def _progress(pool: Pool, number: int, folders: Folders) -> list[str]:
    """Return what the living ranks of a world are doing. This does not disturb them, and may take a second.

    It takes no stacks: the signal for them would end a native call early, such as ``sleep(3)``. The signal for records
    does not.
    """
    world = pool.call(pool.worlds.get, number)
    if world is None or world.state is not WorldState.IN_USE:
        return []
    records = world.inspector.records(pool.call(lambda: world.alive))
    places = {rank: record.place for rank, record in records.items() if record.place and not record.finished}
    finished = [rank for rank, record in records.items() if record.finished]
    return progress_parts(places, finished, records, folders)
