"""Tests of pytest under accelerate, deepspeed, mpirun and srun. Launchers that are not installed are skipped.

Some tests start plain processes with the environment variables of srun instead.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.background_suite import PYTEST, BackgroundSuite
from tests.features.launchers import slurm
from tests.features.launchers.launcher_sessions import RANKS, expect_one_session, suites

ACCELERATE = (
    *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--gpu_ids", "all", "--main_process_port", "0"),
    *("--multi_gpu", "-m", "pytest"),
)
DEEPSPEED = (
    *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "none", "--num_gpus", "2"),
    *("--module", "pytest"),
)


def srun(variables: str, *, rank_1_args: str = "") -> tuple[str, ...]:
    """Return a program that starts two processes with `variables`, as srun would.

    Rank 1 gets the additional arguments `rank_1_args`.
    """
    common = f"env SLURM_JOB_ID=71 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 {variables}"
    script = (
        f'{common} SLURM_PROCID=1 SLURM_LOCALID=1 "$@" {rank_1_args} & '
        f'{common} SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?; wait; exit $code'
    )
    return ("/bin/sh", "-c", script, "srun", *PYTEST)


@pytest.fixture
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundSuite]:
    """Yield an empty suite."""
    with suites(tmp_path_factory) as made:
        yield made


def mpirun(flavour: str, *flags: str) -> tuple[str, ...]:
    """Return a program that starts two processes; skip the test if `flavour` is not installed."""
    program = shutil.which(f"mpirun.{flavour}")
    if program is None:
        pytest.skip(f"there is no mpirun.{flavour} here")
    return (program, *flags, "-n", "2", *PYTEST)


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def check_session(suite: BackgroundSuite, launcher: str, program: tuple[str, ...], environment: dict[str, str]) -> None:
    """Check a session under `launcher`."""
    suite.write("test_it.py", RANKS)
    run = suite.start("--junitxml=report.xml", program=program, environment=environment).finish()
    expect_one_session(suite, run, launcher)


@pytest.mark.long
def test_accelerate_starts_one_session(suite: BackgroundSuite) -> None:
    skip_without("accelerate")
    environment = {"ACCELERATE_USE_CPU": "true", "PET_STANDALONE": "1", "PET_LOCAL_ADDR": "127.0.0.1"}
    check_session(suite, "accelerate launch", ACCELERATE, environment)


@pytest.mark.long
def test_deepspeed_starts_one_session(suite: BackgroundSuite) -> None:
    skip_without("deepspeed")
    check_session(suite, "deepspeed", DEEPSPEED, {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"})


@pytest.mark.long
def test_open_mpi_starts_one_session(suite: BackgroundSuite) -> None:
    program = mpirun("openmpi", "--host", "localhost:2")
    # Open MPI gives the ranks a terminal, so pytest would write colors.
    environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PY_COLORS": "0"}
    check_session(suite, "mpirun", program, environment)


@pytest.mark.long
def test_mpich_starts_one_session(suite: BackgroundSuite) -> None:
    check_session(suite, "mpirun", mpirun("mpich", "-launcher", "fork", "-hosts", "localhost"), {})


@pytest.mark.long
def test_srun_starts_one_session(suite: BackgroundSuite, tmp_path: Path) -> None:
    with slurm.single_node(tmp_path) as running:
        check_session(suite, "srun", (*running.enter, "srun", "-n", "2", *PYTEST), running.environment)


@pytest.mark.long
def test_processes_with_different_arguments_are_refused(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", RANKS)

    run = suite.start(program=srun("SLURM_STEP_TASKS_PER_NODE='2'", rank_1_args="-k test_both")).finish()

    assert run.text.count("ERROR: the processes that srun has started differ in their arguments: rank 0 has -v ") == 1
    assert "rank 1 has -v -p accel -p xdist -p no:cacheprovider -k test_both" in run.text
    assert run.ret == pytest.ExitCode.USAGE_ERROR


def test_a_conftest_that_cannot_be_imported_ends_all_processes_with_the_same_status(suite: BackgroundSuite) -> None:
    suite.write("conftest.py", "import no_such_module\n")
    program = srun("SLURM_STEP_TASKS_PER_NODE='2'")
    program = (*program[:2], program[2].replace("wait;", "wait $!; echo rank 1 ended with $?;"), *program[3:])

    run = suite.start(program=program).finish()

    assert run.text.count("No module named 'no_such_module'") == 1
    assert "rank 1 ended with 4\n" in run.text
    assert run.ret == pytest.ExitCode.USAGE_ERROR
