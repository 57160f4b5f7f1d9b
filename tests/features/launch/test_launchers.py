"""Tests of all installed launchers: each starts ranks on the CPU, which make a process group."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.features.launch.hooks import Launch
from tests import slurm

ALL_REDUCE = Path(__file__).parent / "scripts" / "all_reduce.py"
TIMEOUT = 240.0
"""Seconds after which a launcher counts as hung. None needs more than a tenth of it."""


def read_rank_data(text: str) -> dict[str, Any]:
    """Return the data that a rank of `all_reduce.py` has printed."""
    (line,) = (line for line in text.splitlines() if line.startswith('{"total"'))
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(
    ("launcher", "flavour", "variables"),
    [
        pytest.param("python", "", {}, id="python"),
        pytest.param("torchrun", "", {"LOCAL_WORLD_SIZE": "2"}, id="torchrun"),
        pytest.param("accelerate", "", {"ACCELERATE_USE_CPU": "true"}, id="accelerate", marks=pytest.mark.long),
        pytest.param("deepspeed", "", {"DS_ACCELERATOR": "cpu"}, id="deepspeed", marks=pytest.mark.long),
        pytest.param("mpirun", "openmpi", {"OMPI_COMM_WORLD_SIZE": "2"}, id="openmpi", marks=pytest.mark.long),
        pytest.param("mpirun", "mpich", {"PMI_SIZE": "2"}, id="mpich", marks=pytest.mark.long),
        pytest.param("srun", "", {"SLURM_STEP_NUM_TASKS": "2"}, id="srun", marks=pytest.mark.long),
    ],
)
def test_a_launcher_runs_ranks(
    launch: Launch,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    launcher: str,
    flavour: str,
    variables: dict[str, str],
) -> None:
    with contextlib.ExitStack() as stack:
        if flavour:
            request.getfixturevalue("use_mpi")(flavour)
        if launcher == "srun":
            folder = tmp_path / "slurm"
            folder.mkdir()
            stack.enter_context(slurm.single_node(folder)).put_on_path(folder)
            monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        size = 1 if launcher == "python" else 2
        result = launch(ALL_REDUCE, "--epochs", 1, launcher=launcher, nproc=size, timeout=TIMEOUT)
    assert result.returncode == 0
    assert sorted(result.rank_stdout) == list(range(size))
    for rank, text in result.rank_stdout.items():
        data = read_rank_data(text)
        assert data["total"] == size - 1
        assert data["arguments"][-2:] == ["--epochs", "1"]
        expected = {**variables, "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // size))}
        assert expected.items() <= data["environment"].items()
        mask = data["environment"]["CUDA_VISIBLE_DEVICES"]
        assert not mask or int(mask.split(",")[0]) >= 1000, "it is empty, or names only devices that do not exist"
        assert "PYTEST_CURRENT_TEST" not in data["environment"]
        written = result.rank_stderr[rank]
        assert f"rank {rank} is done" in written
        assert f"rank {1 - rank} is done" not in written
    assert result.stdout.startswith("".join(result.rank_stdout.values()))


def test_output_is_shown_while_the_script_runs(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shown(io.StringIO):
        def write(self, text: str) -> int:
            (tmp_path / "shown").touch()
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", shown := Shown())
    (tmp_path / "writes.py").write_text(
        "import pathlib, sys\nprint('begin')\nwhile not pathlib.Path(sys.argv[1]).exists(): pass\nprint('end')"
    )
    result = launch(tmp_path / "writes.py", tmp_path / "shown", launcher="python", timeout=TIMEOUT)
    assert result.stdout == "begin\nend\n"
    assert shown.getvalue() == "[rank 0] begin\n[rank 0] end\n"


def test_a_module_on_the_path_of_the_test_is_found(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work_of_a_test.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = launch("work_of_a_test", 7, launcher="python", module=True)
    assert result.stdout == "__main__ ['7']\n"
