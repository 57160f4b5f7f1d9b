"""Tests of ``torchrun -m pytest``, which starts one session with a rank in each process."""

from __future__ import annotations

import os

import pytest

from pytest_accel.features.launch.launch_commands import missing
from pytest_accel.features.record.census import read_job
from tests.background_suite import PYTEST, BackgroundSuite, torchrun
from tests.launcher_sessions import PASSES, RANKS, expect_one_session, launched_process, start_endless
from tests.session_server import WITHOUT_TORCH

PROGRAM = torchrun(2)


def test_the_processes_of_torchrun_are_one_session(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", RANKS)

    run = suite.start("--junitxml=report.xml", "--accel-record=record.jsonl", program=PROGRAM).finish()

    expect_one_session(suite, run, "torchrun")
    job = read_job(str(suite.path / "record.jsonl"))
    statuses = {nodeid.partition("::")[2]: outcome.status for nodeid, outcome in job.tests.items()}
    missing = dict.fromkeys(("test_more", "test_of_an_mpi_job"), "missing hardware")
    assert statuses == {**dict.fromkeys(PASSES, "passed"), **missing}
    assert job.complete


@pytest.mark.long
def test_a_launched_process_that_is_killed_is_named_and_ends_the_session(suite: BackgroundSuite) -> None:
    session = start_endless(suite, 1, program=PROGRAM)
    agent = launched_process(suite, "RANK", "1")

    agent.kill()
    run = session.finish()

    assert f"torchrun has lost rank 1 (pid {agent.pid})" in run.text
    assert "test_next" not in run.outcomes()
    assert run.ret == 1


@pytest.mark.long
def test_nothing_is_left_if_the_process_of_rank_0_is_killed(suite: BackgroundSuite) -> None:
    session = start_endless(suite, 1, program=PROGRAM)

    launched_process(suite, "RANK", "0").kill()
    run = session.finish()

    assert run.ret == 1
    assert "passed" not in run.text


_ALONE = """
    import os
    from pathlib import Path

    import pytest

    OF_LAUNCHER = {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    IN_USE = Path(__file__).with_name("in-use")


    @pytest.mark.devices(1)
    @pytest.mark.parametrize("number", range(3))
    def test_device(number, accel):
        assert not OF_LAUNCHER & os.environ.keys()
        IN_USE.touch(exist_ok=False)  # Another process would have the only device, too.
        IN_USE.unlink()


    def test_unmarked():
        assert os.environ["WORLD_SIZE"] == "2"
        assert OF_LAUNCHER <= os.environ.keys()


    @pytest.mark.distributed(3, kind="cpu", init=False)
    def test_more_ranks_than_processes(gather):
        assert gather(os.environ["RANK"]) == ["0", "1", "2"]
"""
_MPI_JOB = """
    import os

    import pytest


    @pytest.mark.distributed(2, launcher="mpirun", kind="cpu", init=False)
    def test_mpi_job(gather):
        numbers = [os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ]
        assert gather(numbers) == [["0"], ["1"]]
"""


@pytest.mark.long(except_for="alone")
@pytest.mark.parametrize("options", [pytest.param((), id="alone"), pytest.param(("-n2",), id="workers")])
def test_each_process_is_a_session_by_itself_unless_it_is_asked(
    suite: BackgroundSuite, options: tuple[str, ...]
) -> None:
    suite.write("pytest.ini", "[pytest]\naccel = sim:1,shared\nfilterwarnings = error\n")
    suite.write("test_it.py", _ALONE)
    if options:
        suite.write("test_mpi.py", _MPI_JOB)
    files = ("--accel-record=record.jsonl", "--accel-durations=times.json", "--accel-output=logs")

    # torchrun itself needs torch.
    path = os.pathsep.join(filter(None, [WITHOUT_TORCH, os.environ.get("PYTHONPATH")]))
    program = (*PROGRAM[: -len(PYTEST[1:])], "--no-python", "env", f"PYTHONPATH={path}", *PYTEST)
    run = suite.start(*files, *options, program=program).finish()

    line = "accel: torchrun has started 2 processes, each with its own session; --accel-launcher on makes one session"
    assert run.text.count(line) == 2, run.text
    assert run.ret == 0, run.text
    for name in ("", ".rank-1"):
        job = read_job(str(suite.path / f"record{name}.jsonl"))
        statuses = {nodeid.partition("::")[2]: outcome.status for nodeid, outcome in job.tests.items()}
        if options:
            assert statuses.pop("test_mpi_job") == ("missing hardware" if missing("mpirun") else "passed")
        assert list(statuses.values()) == ["passed"] * 5
        assert "test_more_ranks_than_processes" in (suite.path / f"times{name}.json").read_text()
        assert len(list((suite.path / f"logs{name}").glob("world-*-rank-2.log"))) == 1
