"""Tests of ``distributed(launcher="mpirun")``: ranks that are the processes of an MPI job."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.background_suite import BackgroundSuite
from tests.deadline import TIMEOUT, eventually, scaled
from tests.documentation import ROOT, blocks
from tests.run import CAUSES

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
_WITH_DEVICES = """
    import os
    from contextlib import suppress

    import psutil
    import pytest
    from tests.deadline import eventually


    @pytest.mark.devices(1)
    @pytest.mark.distributed(2, launcher="mpirun", fresh=True)
    @pytest.mark.parametrize("number", range(2))
    def test_job(number):
        pass


    @pytest.mark.devices(2)
    def test_plain():
        session = psutil.Process(os.getppid()).parent()

        def is_of_a_job(process):
            with suppress(psutil.NoSuchProcess):  # It has just ended.
                return "launchers.mpi" in " ".join(process.cmdline())

        eventually("the job to end with its world", lambda: not any(map(is_of_a_job, session.children(recursive=True))))
"""
"""The devices of each job are those of the next test, and the job ends with its world."""
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
    def test_plain_ranks_after_the_abort():
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
def suite(suite: BackgroundSuite) -> BackgroundSuite:
    """Return a suite in which warnings are errors."""
    suite.write("pytest.ini", "[pytest]\naccel_launcher = on\nfilterwarnings = error\n")
    return suite


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
def test_the_processes_of_a_job_are_the_ranks_of_its_world_alone_and_end_with_it(
    suite: BackgroundSuite, mpi: Mapping[str, str]
) -> None:
    """The tests of the documentation run under Open MPI only."""
    documented: tuple[str, ...] = ()
    if mpi["MPI4PY_MPIABI"] == "openmpi":
        (example,) = blocks(ROOT / "docs" / "how-to" / "process-groups.md", "python mpi")
        suite.write("test_docs.py", example)
        (migrated,) = blocks(ROOT / "docs" / "how-to" / "migrate" / "torchrun.md", "python mpi")
        suite.write("test_migrated.py", migrated.replace("test_sum", "test_migrated_sum"))
        sums = ("test_migrated_sum[world_size=2]", "test_migrated_sum[world_size=3]")
        documented = ("test_sum", *sums, "test_broadcast")
    suite.write("test_world.py", _WORLD)
    suite.write("test_ends.py", _ENDING_JOBS)
    run = suite.start(CAUSES, environment=mpi).finish()
    passed = (
        *documented,
        *("test_its_ranks_are_the_worlds", "test_it_stays", "test_torch_has_its_group_too", "test_plain_ranks"),
        *("test_plain_ranks_after_the_abort", "test_next"),
    )
    failed = {
        "test_one_fails": "FAILED failed: AssertionError; rank 1",
        "test_abort": "FAILED",
        "test_exit": "FAILED died: status 0; rank 0",
    }
    run.expect({**dict.fromkeys(passed, "PASSED"), **failed})
    # Hydra may have killed both ranks before the aborting one has exited.
    assert run.causes["test_abort"] in ("died: status 3; rank 1", "died: job ended; ranks 0-1")

    suite.write("test_devices.py", _WITH_DEVICES)
    options = ("--accel=sim:2,shared", f"--accel-wait={scaled(TIMEOUT):g}")
    run = suite.start(*options, "test_devices.py", environment=mpi).finish()
    run.expect({"test_job[0]": "PASSED", "test_job[1]": "PASSED", "test_plain": "PASSED"})


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
def test_the_output_of_an_mpirun_that_fails_is_shown(suite: BackgroundSuite, tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho there are no slots\nexit 7\n")
    (tmp_path / "mpirun").chmod(0o755)
    suite.write("test_world.py", _WORLD)
    run = suite.start("-k", "test_it_stays", environment={"PATH": f"{tmp_path}:/usr/bin:/bin"}).finish()
    run.expect({"test_it_stays": "ERROR"})
    assert "mpirun has started 0 of 2 processes" in run.failure("test_it_stays")
    assert "there are no slots" in run.failure("test_it_stays")
