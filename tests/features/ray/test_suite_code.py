"""Tests of the comparison of a node's code with the controller's, and of the environment of ranks on a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.features.ray.cluster_node import additions, difference, suite_code

VERSIONS = {"Python": "3.11.7", "torch": "2.13.0"}
HERE = {**VERSIONS, "a.py": "1", "b.py": "2"}


def test_suite_code_has_the_python_files_of_the_suite_and_the_versions(tmp_path: Path) -> None:
    for name in (
        "test_a.py",
        "pkg/b.py",
        ".hidden/c.py",
        "site-packages/d.py",
        "pkg/__pycache__/e.py",
        "data.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = suite_code(str(tmp_path))
    assert sorted(name for name in found if name.endswith(".py")) == ["pkg/b.py", "test_a.py"]
    assert {"Python", "pytest", "pytest-accel"} <= found.keys()
    assert difference(found, suite_code(str(tmp_path))) is None
    (tmp_path / "test_a.py").write_text("changed = True\n")
    assert difference(found, suite_code(str(tmp_path))) == "it has other code: test_a.py"


@pytest.mark.parametrize(
    ("there", "text"),
    [
        (VERSIONS, "it has no Python files there; the suite must have the same path on all machines"),
        ({**VERSIONS, "a.py": "1"}, "it has other code: b.py"),
        (
            {**VERSIONS, **dict.fromkeys(("a.py", "b.py", "c.py", "d.py"), "9")},
            "it has other code: a.py, b.py, c.py and 1 more",
        ),
        ({**HERE, "torch": "2.14.0"}, "it has other code: torch 2.14.0 (here 2.13.0)"),
        ({"Python": "3.11.7", "a.py": "2"}, "it has other code: torch is missing (here 2.13.0), a.py, b.py"),
    ],
)
def test_difference_names_files_and_versions(there: dict[str, str], text: str) -> None:
    assert difference(HERE, there) == text


def test_ranks_get_the_variables_that_their_node_does_not_set() -> None:
    environ = {
        "HF_HOME": "/models",
        "PATH": "/here",
        "PYTEST_ACCEL_SECRET": "00ff",
        "PYTEST_ADDOPTS": "-q",
        "PYTEST_CURRENT_TEST": "test_it",
        "CUDA_VISIBLE_DEVICES": "3",
        "TMPDIR": "/tmp/here",
        "RANK": "0",
        "SLURM_JOB_ID": "71",
    }
    assert additions(environ, ("PATH", "PYTEST_ADDOPTS")) == {"HF_HOME": "/models", "PYTEST_ADDOPTS": "-q"}
