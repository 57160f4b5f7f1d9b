"""Tests of the fixture `launch`: a script sees the GPU of its test, and none in an unmarked test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.device import Device
    from pytest_accel.features.launch.hooks import Launch

SCRIPT = """
import torch
print([str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())])
"""


@pytest.mark.devices(kind="cuda")
@pytest.mark.parametrize("launcher", ["python", "torchrun", "accelerate", "deepspeed", "mpirun"])
def test_a_script_sees_the_gpu_of_the_test(launch: Launch, launcher: str, card: Device, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(SCRIPT)
    result = launch(tmp_path / "trainer.py", launcher=launcher, timeout=240)
    assert result.rank_stdout[0].splitlines()[-1] == f"['{card.id.removeprefix('GPU-')}']"


def test_a_script_of_an_unmarked_test_sees_no_gpu(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(SCRIPT)
    assert launch(tmp_path / "trainer.py", launcher="python", timeout=240).stdout == "[]\n"
