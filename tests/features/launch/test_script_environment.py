"""Tests of the environment of launched scripts, which is a pure function of the test's environment."""

from __future__ import annotations

import sys

import pytest

from pytest_accel.features.launch.launch_api import added_paths, hidden_accelerators, launch_environment

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


def environment_of(environ: dict[str, str], **more: object) -> dict[str, str]:
    """Return the environment of a script that a test with `environ` launches."""
    values = {"own": {}, "hidden": {}, "nproc": 1, "cores": 8, "python_path": (), "changes": {}, **more}
    return launch_environment(environ, **values)  # type: ignore[arg-type]


def test_variables_of_the_tests_own_rank_are_not_passed_on() -> None:
    kept = {"HOME": "/root", "SLURM_JOB_ID": "7", "OMPI_MCA_btl": "self", "CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert kept.items() <= environment_of({**RANK, **kept}).items()
    assert not RANK.keys() & environment_of({**RANK, **kept})


def test_variables_of_coverage_are_passed_on() -> None:
    coverage = {"COVERAGE_PROCESS_START": ".coveragerc", "COVERAGE_PROCESS_CONFIG": "{}", "COV_CORE_SOURCE": "x"}
    assert coverage.items() <= environment_of(coverage).items()


@pytest.mark.parametrize(
    ("environ", "own", "nproc", "threads"),
    [
        ({}, {}, 1, "8"),
        ({}, {}, 3, "2"),
        ({}, {}, 16, "1"),
        ({"OMP_NUM_THREADS": "5"}, {}, 2, "5"),
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}, 2, "4"),
        ({"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": "1"}, 2, "5"),
        ({}, {"OMP_NUM_THREADS": "1"}, 2, "4"),
    ],
)
def test_ranks_share_the_cores_unless_the_user_sets_the_number_of_threads(
    environ: dict[str, str], own: dict[str, str], nproc: int, threads: str
) -> None:
    assert environment_of(environ, own=own, nproc=nproc)["OMP_NUM_THREADS"] == threads


def test_variables_that_the_test_sets_have_priority() -> None:
    changes = {"PYTHONUNBUFFERED": None, "PYTHONPATH": "/mine", "HIDDEN": "no", "RANK": "7"}
    found = environment_of({}, changes=changes, hidden={"HIDDEN": "yes", "ALSO": "yes"}, python_path=("/a", "/b"))
    assert "PYTHONUNBUFFERED" not in found
    assert {"PYTHONPATH": "/mine", "HIDDEN": "no", "ALSO": "yes", "RANK": "7"}.items() <= found.items()


def test_masks_hide_the_devices_of_every_vendor() -> None:
    hidden = hidden_accelerators({"CUDA_VISIBLE_DEVICES": "0"})
    masks = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ZE_AFFINITY_MASK": "-1", "PJRT_DEVICE": "CPU"}
    assert masks.items() <= hidden.items()
    assert {"HABANA_VISIBLE_MODULES", "ASCEND_RT_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES"} <= hidden.keys()


def test_added_paths_are_those_that_plain_python_does_not_have() -> None:
    plain = [entry for entry in sys.path if "python" in entry and ("lib" in entry or entry.endswith(".zip"))]
    assert added_paths(["", "/suite/tests", "/suite", *plain]) == ("/suite/tests", "/suite")
    assert added_paths(plain) == ()
