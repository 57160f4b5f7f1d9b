"""Tests that preloading detects an initialised accelerator runtime, which makes a fork server unusable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys, types
import torch
from pytest_accel.forkserver.preload import unfit

module = types.ModuleType("torch.fakeacc")
module.is_initialized = lambda: sys.argv[1] == "up"
torch.utils.rename_privateuse1_backend("fakeacc")
torch._register_device_module("fakeacc", module)
print(json.dumps(unfit()))
"""


@pytest.mark.long(except_for="down-None")
@pytest.mark.parametrize(("runtime", "reason"), [("up", "initialises the fakeacc runtime"), ("down", None)])
def test_a_device_runtime_that_only_its_package_can_report_is_detected(runtime: str, reason: str | None) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, runtime],
        # As in the fork server. Otherwise OpenBLAS starts threads when it is loaded.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == reason
