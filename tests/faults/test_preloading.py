from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKEND = """
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
@pytest.mark.parametrize(("runtime", "why"), [("up", "initialises the fakeacc runtime"), ("down", None)])
def test_a_device_runtime_that_only_its_package_can_report_is_detected(runtime: str, why: str | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BACKEND, runtime],
        # As in the fork server: OpenBLAS starts threads when it is loaded.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == why
