"""Tests of the pool's client of a fork server: real servers and ranks, in a real event loop."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from pytest_accel.core import session_folder
from pytest_accel.core.session_folder import rank_path
from pytest_accel.core.world_key import WorldKey
from pytest_accel.forkserver.client import ForkServerClient
from pytest_accel.forkserver.server_messages import RankExited, ServerReport, WorldStarted
from pytest_accel.forkserver.server_process import spawn_here
from pytest_accel.messages.rank_messages import ExitCause, RankExit
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from tests.deadline import TIMEOUT, eventually, scaled

_Report = TypeVar("_Report")
KILLED = RankExit(ExitCause.EXITED, -signal.SIGKILL)
CONFTEST = """
    import os, subprocess
    from pathlib import Path

    here = Path(__file__).parent

    def pytest_sessionstart(session):
        program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if (child := os.fork()) == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "1000"]) if not (here / "forks").exists() else os.read(os.pipe()[0], 1)
        text = f"{program.pid} {child} {os.environ.get('VARIABLE')}"
        (here / f"rank-{os.getpid()}.new").write_text(text)
        (here / f"rank-{os.getpid()}.new").rename(here / f"rank-{os.getpid()}")
    """
"""Each rank starts a program, and forks a child, which goes on as a fork if there is a file `forks`."""


class ReportQueue:
    """Messages of a fork server, which a test awaits by their types, and its end."""

    def __init__(self) -> None:
        self.came: list[Any] = []
        self._changed = asyncio.Event()

    def add(self, report: ServerReport | str) -> None:
        self.came.append(report)
        self._changed.set()

    def ended(self, server: int, loss: str | None) -> None:
        self.add(f"server {server} has ended: {loss}")

    async def next(self, form: type[_Report], **fields: object) -> _Report:
        """Wait for a report of the type `form` with these fields, remove it, and return it."""
        while True:
            for report in self.came:
                if isinstance(report, form) and all(getattr(report, name) == fields[name] for name in fields):
                    self.came.remove(report)
                    return report
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), scaled(TIMEOUT))


class RankSuite:
    """A suite whose ranks a test starts without a pytest session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "device.lock"
        (path / "conftest.py").write_text(textwrap.dedent(CONFTEST))
        directory = session_folder.create()
        self.spec = SessionSpec(
            args=("-p", "no:cacheprovider", str(path)),
            invocation_dir=str(path),
            sys_path=tuple(sys.path),
            directory=directory,
            basetemp=os.path.join(directory, "tmp"),
            preload=None,
            plugin_options=None,
            roles=(),
            markers=(),
            hidden=(),
            distributed=False,
            worker_input={"testrunuid": "run", "mainargv": []},
        )

    def world(self, number: int, ranks: int = 1, **fields: Any) -> WorldSpec:
        """Return a world whose ranks have no devices and no torch."""
        key = WorldKey("cpu", None, ranks, grouped=True, init=False, **fields)
        return WorldSpec(number, key, workers=tuple(range(ranks)), worker_count=ranks)

    def take_lock(self) -> int:
        """Lock the lock file, and return the descriptor of the open file."""
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    def is_locked(self) -> bool:
        """Return whether a process has the lock file open and locked."""
        try:
            os.close(self.take_lock())
        except BlockingIOError:
            return True
        return False

    async def facts(self, pid: int) -> list[str]:
        """Wait until the rank `pid` is in its session; return the pids of its program and child, and a variable."""
        path = self.path / f"rank-{pid}"
        text: str = await soon(lambda: path.exists() and path.read_text())
        return text.split()


async def soon(look: Callable[[], Any]) -> Any:
    """Call `look` until its result is true and return this result."""

    async def wait() -> Any:
        while not (found := look()):
            await asyncio.sleep(0.02)
        return found

    return await asyncio.wait_for(wait(), scaled(TIMEOUT))


def lives(pid: int) -> bool:
    """Return whether the process `pid` runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[RankSuite]:
    suite = RankSuite(tmp_path)
    yield suite
    assert not os.path.exists(suite.spec.directory)
    assert not suite.is_locked()


def run(suite: RankSuite, test: Callable[[ForkServerClient, ReportQueue], Awaitable[None]]) -> None:
    """Run `test` in a loop with a fork server, which then stops without a report, and leaves nothing."""

    async def main() -> None:
        reports = ReportQueue()
        server = ForkServerClient(suite.spec, spawn_here, reports.add, reports.ended)
        try:
            await test(server, reports)
        finally:
            stopped = await server.stop()
        assert stopped
        assert reports.came == []

    asyncio.run(main())


def test_ranks_start_and_end_as_they_are_told(suite: RankSuite) -> None:
    async def test(server: ForkServerClient, reports: ReportQueue) -> None:
        server.start(suite.world(1, ranks=2))
        server.start(suite.world(2))
        started = await reports.next(WorldStarted, world=1)
        (other,) = (await reports.next(WorldStarted, world=2)).pids
        pids, port = started.pids, started.port
        assert len({*pids, other}) == 3
        assert port is not None
        left = [int(pid) for rank in pids for pid in (await suite.facts(rank))[:2]]
        server.kill(1)
        for rank in range(2):
            assert (await reports.next(RankExited, world=1, rank=rank)).exit == KILLED
        await soon(lambda: not any(map(lives, (*pids, *left))))
        os.kill(other, signal.SIGTERM)
        assert (await reports.next(RankExited, world=2, rank=0)).exit == RankExit(ExitCause.EXITED, -signal.SIGTERM)
        server.kill(1)  # It has ended.

    run(suite, test)


def test_a_world_keeps_the_locks_of_its_devices(suite: RankSuite) -> None:
    (suite.path / "forks").touch()

    async def test(server: ForkServerClient, reports: ReportQueue) -> None:
        descriptor = suite.take_lock()
        server.start(suite.world(1, ranks=2), [descriptor])
        server.start(suite.world(2))  # Its ranks do not have the lock.
        os.close(descriptor)
        pids = (await reports.next(WorldStarted, world=1)).pids
        (other,) = (await reports.next(WorldStarted, world=2)).pids
        for pid in (*pids, other):
            await suite.facts(pid)
        assert suite.is_locked()
        server.kill(1)
        await soon(lambda: not suite.is_locked())
        assert lives(other)

        descriptor = suite.take_lock()
        server.start(suite.world(3, env=(("VARIABLE", "set"),)), [descriptor])
        os.close(descriptor)
        (pid,) = (await reports.next(WorldStarted, world=3)).pids
        *_, variable = await suite.facts(pid)
        assert variable == "set"  # The rank is a new interpreter.
        assert suite.is_locked()
        server.kill(3)
        await soon(lambda: not suite.is_locked())

        descriptor = suite.take_lock()
        Path(rank_path(suite.spec.directory, 4, 0, "sock")).touch()
        server.start(suite.world(4), [descriptor])
        os.close(descriptor)
        failed = await reports.next(WorldStarted, world=4)
        assert "Address already in use" in failed.problem
        assert not suite.is_locked()
        reports.came.clear()

    run(suite, test)


_CONTROLLER = """
    import asyncio, sys
    from pathlib import Path

    from tests.forkserver.test_client import ReportQueue, RankSuite
    from pytest_accel.forkserver.client import ForkServerClient
    from pytest_accel.forkserver.server_messages import WorldStarted
    from pytest_accel.forkserver.server_process import spawn_here

    async def main():
        suite, reports = RankSuite(Path(sys.argv[1])), ReportQueue()
        server = ForkServerClient(suite.spec, spawn_here, reports.add, reports.ended)
        server.start(suite.world(1), [suite.take_lock()])
        (rank,) = (await reports.next(WorldStarted, world=1)).pids
        program, child, _ = await suite.facts(rank)
        print(server._process.process.pid, rank, program, child, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
    """


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not kill the ranks of a dead server")
def test_a_device_stays_locked_while_a_fork_of_a_killed_session_lives(suite: RankSuite) -> None:
    (suite.path / "forks").touch()
    command = [sys.executable, "-c", textwrap.dedent(_CONTROLLER), str(suite.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        server, rank, program, child = (psutil.Process(int(pid)) for pid in controller.stdout.readline().split())
        directory = Path(server.environ()["PYTEST_ACCEL_SESSION"]).parent
        try:
            for process in (server, controller):
                process.send_signal(signal.SIGSTOP)  # So that neither notices the end of the other.
            for process in (server, controller):
                process.kill()
            eventually("the rank's end", lambda: not lives(rank.pid))
            assert program.is_running()
            assert suite.is_locked()
            child.kill()
            eventually("the lock's end", lambda: not suite.is_locked())
        finally:
            for process in (server, rank, program, child):
                if process.is_running():
                    process.kill()
    assert not lives(controller.pid)
    session_folder.remove(str(directory))
    session_folder.remove(suite.spec.directory)


def test_the_end_of_a_server_is_reported(suite: RankSuite) -> None:
    async def test(server: ForkServerClient, reports: ReportQueue) -> None:
        descriptor = suite.take_lock()
        server.start(suite.world(1), [descriptor])
        os.close(descriptor)
        (pid,) = (await reports.next(WorldStarted, world=1)).pids
        await suite.facts(pid)
        parent = psutil.Process(pid).ppid()
        os.kill(parent, signal.SIGSTOP)
        for _ in range(10_000):  # More than fits into the socket, so that the server is killed.
            server.kill(2)
        assert await reports.next(str) == "server 0 has ended: None"
        await soon(lambda: not lives(pid))
        server.start(suite.world(2))
        server.kill(2)
        left = [int(program) for program in (await suite.facts(pid))[:2]]
        await soon(lambda: not any(map(lives, left)))

    run(suite, test)
    session_folder.remove(suite.spec.directory)  # A killed server cannot remove it.


def test_a_server_that_imports_blocks_nobody(suite: RankSuite) -> None:
    async def test(server: ForkServerClient, reports: ReportQueue) -> None:
        server.start(suite.world(1, env=(("NCCL_LARGE", "x" * (1 << 22)),)))  # More than fits into the socket.
        await reports.next(WorldStarted, world=1)

    run(suite, test)
