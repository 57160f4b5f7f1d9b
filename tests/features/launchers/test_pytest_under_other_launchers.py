"""Tests of pytest under accelerate, deepspeed, mpirun and srun. Launchers that are not installed are skipped.

Some tests start plain processes with the environment variables of srun instead.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests import slurm
from tests.background_suite import PYTEST, BackgroundSuite
from tests.launcher_sessions import RANKS, expect_one_session

ACCELERATE = (
    *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--gpu_ids", "all", "--main_process_port", "0"),
    *("--multi_gpu", "-m", "pytest"),
)
DEEPSPEED = (
    *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "none", "--num_gpus", "2"),
    *("--module", "pytest"),
)
MPICH = ("mpirun.mpich", "-launcher", "fork", "-hosts", "localhost", "-n", "2", *PYTEST)
CORES = sorted(os.sched_getaffinity(0))[:2]
"""The cores to which :func:`srun` binds its processes, one to each."""


def srun(rank_1_args: str = "") -> tuple[str, ...]:
    """Return a program that starts two processes as srun would; rank 1 gets the additional arguments `rank_1_args`."""
    common = "env SLURM_JOB_ID=71 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2"
    script = (
        f'taskset -c {CORES[-1]} {common} SLURM_PROCID=1 SLURM_LOCALID=1 "$@" {rank_1_args} & '
        f'taskset -c {CORES[0]} {common} SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?; wait; exit $code'
    )
    return ("/bin/sh", "-c", script, "srun", *PYTEST)


SRUN = srun()


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "program", "environment"),
    [
        (
            "accelerate",
            ACCELERATE,
            {"ACCELERATE_USE_CPU": "true", "PET_STANDALONE": "1", "PET_LOCAL_ADDR": "127.0.0.1"},
        ),
        ("deepspeed", DEEPSPEED, {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}),
        ("mpirun.mpich", MPICH, {}),
        ("srun", ("srun", "-n", "2", *PYTEST), {}),
    ],
    ids=["accelerate", "deepspeed", "mpich", "srun"],
)
def test_each_launcher_starts_one_session(
    suite: BackgroundSuite, tmp_path: Path, launcher: str, program: tuple[str, ...], environment: dict[str, str]
) -> None:
    """Open MPI has such sessions in `test_several_machines.py` and `tests/faults/test_verdict_matrix.py`."""
    if importlib.util.find_spec(launcher.partition(".")[0]) is None and shutil.which(launcher) is None:
        pytest.skip(f"there is no {launcher} here")
    suite.write("test_it.py", RANKS)
    with slurm.single_node(tmp_path) if launcher == "srun" else nullcontext() as running:
        if running is not None:
            program, environment = (*running.enter, *program), running.environment
        run = suite.start("--junitxml=report.xml", program=program, environment=environment).finish()
    name = {"accelerate": "accelerate launch", "mpirun.mpich": "mpirun"}.get(launcher, launcher)
    expect_one_session(suite, run, name)


@pytest.mark.long
def test_xdist_is_refused(suite: BackgroundSuite) -> None:
    suite.write("pytest.ini", "[pytest]\n")
    suite.write("test_it.py", RANKS)

    run = suite.start("-n", "2", program=SRUN, environment={"PYTEST_ACCEL_LAUNCHER": "on"}).finish()

    assert run.text.count("ERROR: -n 2 under srun: use only one of the two.") == 1
    assert run.ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.long
def test_processes_with_different_arguments_are_refused(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", RANKS)

    run = suite.start(program=srun("-k test_both")).finish()

    assert run.text.count("ERROR: the processes that srun has started differ in their arguments: rank 0 has -v ") == 1
    assert "rank 1 has -v -p accel -p xdist -p no:cacheprovider -k test_both" in run.text
    assert run.ret == pytest.ExitCode.USAGE_ERROR


def test_a_conftest_that_cannot_be_imported_ends_all_processes_with_the_same_status(suite: BackgroundSuite) -> None:
    suite.write("conftest.py", "import no_such_module\n")
    program = (*SRUN[:2], SRUN[2].replace("wait;", "wait $!; echo rank 1 ended with $?;"), *SRUN[3:])

    run = suite.start(program=program).finish()

    assert run.text.count("No module named 'no_such_module'") == 1
    assert "rank 1 ended with 4\n" in run.text
    assert run.ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.long
def test_tests_without_a_mark_and_tests_that_only_a_rank_has_collected_are_errors(suite: BackgroundSuite) -> None:
    """Tests without a mark are errors in a strict session. Ranks may use the cores of all launched processes."""
    suite.write(
        "test_it.py",
        """
        import os

        import pytest


        def test_without_mark():
            pass


        @pytest.mark.skip
        def test_skipped():
            pass


        @pytest.mark.distributed(2)
        def test_marked(gather):
            cores = sorted(os.sched_getaffinity(0))
            assert gather(cores) == 2 * [[int(core) for core in os.environ["CORES"].split()]]


        @pytest.mark.distributed(2)
        @pytest.mark.parametrize("word", ["a", "b"] if os.environ.get("RANK", "0") == "0" else ["a"])
        def test_collected_otherwise(word):
            pass
        """,
    )

    environment = {"CORES": " ".join(map(str, CORES))}
    run = suite.start("--accel-strict", program=SRUN, environment=environment).finish()

    errors = ("test_without_mark", "test_collected_otherwise[a]", "test_collected_otherwise[b]")
    run.expect({**dict.fromkeys(errors, "ERROR"), "test_skipped": "SKIPPED", "test_marked": "PASSED"})
    assert "has collected 1 of test_collected_otherwise, and the driver 2" in run.failure("test_collected_otherwise[b]")
    text = "so it would run once, not in the 2 processes that srun has started (--accel-strict)"
    assert text in run.failure("test_without_mark")
    assert "ran once, not in" not in run.text
    assert run.text.count("1 passed, 1 skipped, 3 errors") == 1
    assert run.ret == 1
