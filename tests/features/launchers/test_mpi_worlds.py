"""Tests of ``distributed(launcher="mpirun")``: ranks that are the processes of an MPI job."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.world_key import WorldKey
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.features.launch.launch_commands import missing
from pytest_accel.features.launchers.mpi import MpiJob
from pytest_accel.forkserver import server_client
from pytest_accel.forkserver.server_client import ForkServerClient, ServerCallbacks, Spawn
from pytest_accel.forkserver.server_messages import StartFailed
from tests.background_suite import BackgroundSuite
from tests.deadline import TIMEOUT, eventually
from tests.features.launchers.launcher_sessions import suites
from tests.test_docs import ROOT, TORCHRUN, blocks

needs_mpi4py = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")

_HEAD = """
    import os
    import signal

    import pytest

    pytestmark = pytest.mark.distributed(2, launcher="mpirun")


    @pytest.fixture
    def world():
        from mpi4py import MPI

        return MPI.COMM_WORLD
"""
_WORLD = (
    _HEAD
    + """
    pids = []


    def test_its_ranks_are_the_worlds(world, rank):
        assert world.rank == rank
        pids.append(os.getpid())


    def test_it_stays(world, rank):
        assert world.allgather(rank) == [0, 1]
        assert pids == [os.getpid()]


    def test_torch_has_its_group_too():
        import torch
        import torch.distributed as dist

        values = torch.ones(1)
        dist.all_reduce(values)
        assert values.item() == 2


    def test_one_fails(world):
        assert world.rank == 0


    @pytest.mark.distributed(2, launcher=None)
    def test_plain_ranks():
        assert not {"OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys()
"""
)
_ENDING_JOBS = (
    _HEAD
    + """

    def test_abort(world):
        world.Barrier()
        if world.rank == 1:
            world.Abort(3)
        world.Barrier()


    @pytest.mark.distributed(2, launcher=None)
    def test_plain_ranks():
        import torch.distributed as dist

        dist.barrier()


    def test_exit(world):
        world.Barrier()
        if world.rank == 0:
            os._exit(0)
        world.Barrier()


    def test_next(world, rank):
        assert world.allgather(rank) == [0, 1]
"""
)


@pytest.fixture
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundSuite]:
    """Yield a suite in which warnings are errors."""
    with suites(tmp_path_factory) as made:
        made.write("pytest.ini", "[pytest]\naccel_launcher = on\nfilterwarnings = error\n")
        yield made


@pytest.fixture
def mpi(request: pytest.FixtureRequest, use_mpi: Callable[[str], None], tmp_path: Path) -> Mapping[str, str]:
    """Choose an MPI, and provide the variables with which mpi4py's wheel finds its library."""
    use_mpi(request.param)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    if request.param == "mpich":
        # Programs that are built for any MPICH load a library of this name. Debian gives it another name.
        found = next(Path("/usr/lib").glob("*/libmpich.so.12"), None)
        if found is not None:
            (libraries / "libmpi.so.12").symlink_to(found)
    return {"MPI4PY_MPIABI": request.param, "LD_LIBRARY_PATH": str(libraries)}


@pytest.mark.long
@needs_mpi4py
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"], indirect=True)
def test_the_processes_of_a_job_are_the_ranks_of_its_world(suite: BackgroundSuite, mpi: Mapping[str, str]) -> None:
    suite.write("test_world.py", _WORLD)
    (documented,) = blocks(ROOT / "docs" / "how-to" / "jax-and-mpi.md", "python mpi")
    suite.write("test_docs.py", documented)
    (migrated,) = blocks(ROOT / "docs" / "how-to" / "migrate" / "mpi-pytest.md", "python mpi")
    suite.write("test_migrated.py", migrated.replace("test_sum", "test_migrated_sum"))
    run = suite.start(environment=mpi).finish()
    run.expect(
        {
            "test_sum": "PASSED",
            "test_migrated_sum[world_size=2]": "PASSED",
            "test_migrated_sum[world_size=3]": "PASSED",
            "test_broadcast": "PASSED",
            "test_its_ranks_are_the_worlds": "PASSED",
            "test_it_stays": "PASSED",
            "test_torch_has_its_group_too": "PASSED",
            "test_one_fails": "FAILED",
            "test_plain_ranks": "PASSED",
        }
    )
    assert "rank 1: failed at test_world.py" in run.failure("test_one_fails")
    assert "rank 0: passed" in run.failure("test_one_fails")


@pytest.mark.long
@needs_mpi4py
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"], indirect=True)
def test_a_job_that_dies_ends_only_its_own_world(suite: BackgroundSuite, mpi: Mapping[str, str]) -> None:
    suite.write("test_ends.py", _ENDING_JOBS)
    run = suite.start(environment=mpi).finish(2 * TIMEOUT)  # Three jobs, one after the other.
    run.expect({"test_abort": "FAILED", "test_plain_ranks": "PASSED", "test_exit": "FAILED", "test_next": "PASSED"})
    # Hydra may have killed both ranks before the aborting one has exited.
    ended = "ended with its MPI job, since a rank has called MPI_Abort or has died"
    rank_lines = re.findall(r"^ranks? .*", run.failure("test_abort"), re.MULTILINE)
    if rank_lines != ["ranks 0-1 of 2 on cpu", f"ranks 0-1 {ended}", "ranks 0-1: died"]:
        *lines, rank_0 = rank_lines
        assert lines == ["rank 1 of 2 on cpu", "rank 1 exited with status 3", "rank 1: died"]
        # On a busy machine, the MPI job may end later than the time for which the driver waits after a death.
        stopped = "rank 0: .* when it was stopped .* s after rank 1 died"
        assert re.fullmatch(f"rank 0: failed as a consequence: {ended}|{stopped}", rank_0)
    assert "rank 0 exited with status 0" in run.failure("test_exit")


@pytest.mark.long
@needs_mpi4py
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_a_job_ends_with_its_session(suite: BackgroundSuite, mpi: Mapping[str, str]) -> None:
    suite.write(
        "test_waits.py",
        _HEAD
        + """

    def test_waits(world):
        world.Barrier()
        if world.rank == 0:
            with open("waits", "w") as file:
                print("now", file=file)
        signal.pause()
""",
    )
    session = suite.start(environment=mpi)
    assert suite.read("waits") == "now"
    session.process.kill()
    session.process.wait()
    eventually("the job's end", lambda: not suite.processes())


@pytest.mark.long
def test_a_test_is_skipped_without_mpirun(suite: BackgroundSuite, tmp_path: Path) -> None:
    suite.write("test_world.py", _WORLD)
    run = suite.start("-k", "test_it_stays", environment={"PATH": str(tmp_path)}).finish()
    run.expect({"test_it_stays": "SKIPPED"})
    assert "launcher 'mpirun': there is no mpirun or mpiexec beside Python or on PATH" in run.text
    strict = suite.start("-k", "test_it_stays", "--accel-strict", environment={"PATH": str(tmp_path)}).finish()
    assert strict.ret == 1


@pytest.mark.long
def test_the_output_of_an_mpirun_that_fails_is_shown(suite: BackgroundSuite, tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho there are no slots\nexit 7\n")
    (tmp_path / "mpirun").chmod(0o755)
    suite.write("test_world.py", _WORLD)
    run = suite.start("-k", "test_it_stays", environment={"PATH": f"{tmp_path}:/usr/bin:/bin"}).finish()
    run.expect({"test_it_stays": "ERROR"})
    assert "mpirun has started 0 of 2 processes" in run.failure("test_it_stays")
    assert "there are no slots" in run.failure("test_it_stays")


_MPIRUN = """#!/bin/sh
[ "$1" = --version ] && exit
shift 6
PMI_RANK=0 "$@" &
PMI_RANK=1 "$@" &
wait
"""
"""A program that starts two processes, with the flags and variables of Hydra."""


def test_a_job_whose_fork_servers_cannot_be_started_fails_only_its_own_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mpirun").write_text(_MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    clients: list[ForkServerClient] = []

    def start_one(spec: SessionSpec, callbacks: ServerCallbacks, spawn: Spawn) -> ForkServerClient:
        if clients:
            raise OSError(errno.EMFILE, "Too many open files")
        clients.append(ForkServerClient(spec, callbacks, spawn))
        return clients[0]

    monkeypatch.setattr(server_client, "ForkServerClient", start_one)
    directory = tmp_path / "session"
    spec = SessionSpec((), "/", tuple(sys.path), str(directory), "/", (), (), (), (), (), False)
    world = WorldSpec(7, WorldKey("none", None, 2, True, launcher="mpirun"), servers=(1, 2))
    messages: list[object] = []
    failures: list[str] = []
    ended = threading.Event()
    callbacks = ServerCallbacks(messages.append, lambda *_: None, lambda: None, failures.append)
    job = MpiJob(spec, callbacks, threading.RLock(), "mpirun", world, ended.set)
    with open(directory / "session.lock") as file, pytest.raises(BlockingIOError):  # This session counts as alive.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    job._thread.join(60)
    assert failures == []
    assert ended.is_set()
    assert isinstance(messages[0], StartFailed)
    assert messages[0].world == 7
    assert "Too many open files" in messages[0].text
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or ())]


@needs_mpi4py
@pytest.mark.long
def test_a_test_is_skipped_in_a_session_of_launched_processes(suite: BackgroundSuite) -> None:
    if reason := missing("mpirun"):
        pytest.skip(reason)
    suite.write("test_world.py", _WORLD)
    torchrun = (sys.executable, *TORCHRUN, "-m", "pytest")
    run = suite.start("-k", "test_it_stays", program=torchrun).finish()
    run.expect({"test_it_stays": "SKIPPED"})
    assert "its ranks are started by mpirun, which a session under torchrun does not do" in run.text
    run = suite.start("-k", "its_ranks or it_stays", "--accel-launcher=off", program=torchrun).finish()
    assert (run.ret, run.text.count(" 2 passed, ")) == (0, 2), run.text
