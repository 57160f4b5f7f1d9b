"""The environment of what is launched, as a pure function of the test's."""

from __future__ import annotations

import sys

import pytest

from pytest_accel.launch.launch_environment import added_paths, hidden_accelerators, launch_environment

RANK = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMPI_COMM_WORLD_RANK": "1",
    "PMI_RANK": "1",
    "SLURM_PROCID": "1",
    "PYTEST_XDIST_WORKER": "gw1",
    "PYTEST_CURRENT_TEST": "test_it (call)",
}


def made(environ: dict[str, str], **more: object) -> dict[str, str]:
    values = {"own": (), "hidden": {}, "nproc": 1, "cores": 8, "python_path": (), "changes": {}, **more}
    return launch_environment(environ, **values)  # type: ignore[arg-type]


def test_nothing_of_the_tests_own_rank_is_passed_on() -> None:
    kept = {"HOME": "/root", "SLURM_JOB_ID": "7", "OMPI_MCA_btl": "self", "CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert kept.items() <= made({**RANK, **kept}).items()
    assert not RANK.keys() & made({**RANK, **kept})


def test_variables_of_coverage_are_passed_on() -> None:
    coverage = {"COVERAGE_PROCESS_START": ".coveragerc", "COVERAGE_PROCESS_CONFIG": "{}", "COV_CORE_SOURCE": "x"}
    assert coverage.items() <= made(coverage).items()


@pytest.mark.parametrize(
    ("environ", "own", "nproc", "threads"),
    [
        ({}, (), 1, "8"),
        ({}, (), 3, "2"),
        ({}, (), 16, "1"),
        ({"OMP_NUM_THREADS": "5"}, (), 2, "5"),
        ({"OMP_NUM_THREADS": "1"}, ("OMP_NUM_THREADS",), 2, "4"),
    ],
)
def test_ranks_share_the_cores_unless_the_user_sets_the_number_of_threads(
    environ: dict[str, str], own: tuple[str, ...], nproc: int, threads: str
) -> None:
    assert made(environ, own=own, nproc=nproc)["OMP_NUM_THREADS"] == threads


def test_variables_that_the_test_sets_have_priority() -> None:
    changes = {"PYTHONUNBUFFERED": None, "PYTHONPATH": "/mine", "HIDDEN": "no", "RANK": "7"}
    found = made({}, changes=changes, hidden={"HIDDEN": "yes", "ALSO": "yes"}, python_path=("/a", "/b"))
    assert "PYTHONUNBUFFERED" not in found
    assert {"PYTHONPATH": "/mine", "HIDDEN": "no", "ALSO": "yes", "RANK": "7"}.items() <= found.items()


def test_masks_that_hide_every_vendors_devices() -> None:
    hidden = hidden_accelerators({"CUDA_VISIBLE_DEVICES": "0"})
    masks = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ZE_AFFINITY_MASK": "-1", "PJRT_DEVICE": "CPU"}
    assert masks.items() <= hidden.items()
    assert {"HABANA_VISIBLE_MODULES", "ASCEND_RT_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES"} <= hidden.keys()


def test_paths_that_the_tests_have_been_given() -> None:
    plain = [entry for entry in sys.path if "python" in entry and ("lib" in entry or entry.endswith(".zip"))]
    assert added_paths(["", "/suite/tests", "/suite", *plain]) == ("/suite/tests", "/suite")
    assert added_paths(plain) == ()
