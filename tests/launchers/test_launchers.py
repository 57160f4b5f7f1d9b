"""Every launcher that is installed, for real: two ranks on the CPU, in a process group of their own making."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.launchers import slurm

if TYPE_CHECKING:
    from pytest_accel.launch.launch_api import Launch

ALL_REDUCE = Path(__file__).parent / "scripts" / "all_reduce.py"
TIMEOUT = 240.0
"""Seconds after which a launcher counts as hung; none takes a tenth of it."""
LONG_LINE = """
import pathlib, sys, time

print("0123456789" * 300_000, end="", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
print(" and its end\\nwithout an end", end="")
"""
SPAWNS = """
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, size, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    values = torch.tensor([rank + 1.0])
    dist.all_reduce(values)
    os.write(1, f"rank-{rank}-of-{size}:{values.item()}\\n".encode())  # In one piece, unlike print.
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(2, os.path.abspath(__file__) + ".met"), nprocs=2, join=True)
"""


def told(text: str) -> dict[str, Any]:
    """Return the data that a rank of `all_reduce.py` has printed."""
    (line,) = (line for line in text.splitlines() if line.startswith('{"total"'))
    found: dict[str, Any] = json.loads(line)
    return found


def examine(launch: Launch, launcher: str, *, streams_apart: bool = True) -> dict[int, dict[str, Any]]:
    """Check what holds for each launcher, and return the data of the ranks."""
    result = launch(ALL_REDUCE, "--epochs", 1, launcher=launcher, nproc=2, output=True, timeout=TIMEOUT)
    assert result.returncode == 0
    ranks = {rank: told(text) for rank, text in result.rank_stdout.items()}
    assert sorted(ranks) == [0, 1]
    for rank, one in ranks.items():
        assert one["total"] == 1.0
        assert one["arguments"][-2:] == ["--epochs", "1"]
        assert one["environment"]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert "PYTEST_CURRENT_TEST" not in one["environment"]
        written = result.rank_stderr[rank] if streams_apart else result.rank_stdout[rank]
        assert f"rank {rank} is done" in written
        assert f"rank {1 - rank} is done" not in written
    assert result.stdout.startswith(result.rank_stdout[0] + result.rank_stdout[1])
    return ranks


def sees_no_gpu(environment: dict[str, str]) -> bool:
    mask = environment["CUDA_VISIBLE_DEVICES"]
    return not mask or int(mask.split(",")[0]) >= 1000


@pytest.mark.long(except_for="torchrun")
@pytest.mark.parametrize("launcher", ["torchrun"])
def test_torchrun(launch: Launch, launcher: str) -> None:
    ranks = examine(launch, launcher)
    assert all(sees_no_gpu(one["environment"]) for one in ranks.values())
    assert {one["environment"]["LOCAL_RANK"] for one in ranks.values()} == {"0", "1"}


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["accelerate"])
def test_accelerate(launch: Launch, launcher: str) -> None:
    ranks = examine(launch, launcher)
    assert all(sees_no_gpu(one["environment"]) for one in ranks.values())
    assert {one["environment"]["ACCELERATE_USE_CPU"] for one in ranks.values()} == {"true"}


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["accelerate"])
def test_accelerate_with_one_process(launch: Launch, launcher: str) -> None:
    result = launch(ALL_REDUCE, launcher=launcher, output=True, timeout=TIMEOUT)
    one = told(result.rank_stdout[0])
    assert one["environment"]["ACCELERATE_USE_CPU"] == "True"
    assert list(result.rank_stdout) == [0]


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["deepspeed"])
def test_deepspeed(launch: Launch, launcher: str) -> None:
    ranks = examine(launch, launcher, streams_apart=False)
    assert all(sees_no_gpu(one["environment"]) for one in ranks.values())
    assert {one["environment"]["DS_ACCELERATOR"] for one in ranks.values()} == {"cpu"}


@pytest.mark.nightly
@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_mpirun(launch: Launch, use_mpi: Callable[[str], None], flavour: str) -> None:
    use_mpi(flavour)
    ranks = examine(launch, "mpirun")
    assert all(sees_no_gpu(one["environment"]) for one in ranks.values())


@pytest.mark.long
def test_srun(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm.alone(folder) as running:
        running.put_on_path(folder)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        examine(launch, "srun")


def test_python(launch: Launch) -> None:
    result = launch(ALL_REDUCE, "--epochs", 1, launcher="python", output=True, timeout=TIMEOUT)
    one = told(result.stdout)
    assert one["arguments"] == ["--epochs", "1"]
    assert sees_no_gpu(one["environment"])
    assert "rank 0 is done" in result.rank_stderr[0]


def test_a_very_long_line_is_shown_completely_and_as_it_grows(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"

    class Shown(io.StringIO):
        def write(self, text: str) -> int:
            go.touch()
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", shown := Shown())
    (tmp_path / "writes.py").write_text(LONG_LINE)
    written = launch(tmp_path / "writes.py", go, launcher="python", timeout=TIMEOUT).stdout
    assert written == "0123456789" * 300_000 + " and its end\n" + "without an end"
    assert shown.getvalue() == f"{written}\n"


@pytest.mark.long
def test_a_script_can_spawn_its_own_ranks(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    assert sorted(launch(tmp_path / "spawns.py", launcher="python").stdout.split()) == [
        "rank-0-of-2:3.0",
        "rank-1-of-2:3.0",
    ]


def test_a_module_on_the_path_of_the_test_is_found(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work_of_a_test.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = launch("work_of_a_test", 7, launcher="python", module=True)
    assert result.stdout == "__main__ ['7']\n"
