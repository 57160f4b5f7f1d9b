"""Test of a GPU that another program uses.

It runs in the main process: all processes that a rank starts belong to the session, and so are no other programs.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_accel.hardware.registry import make_vendor

if TYPE_CHECKING:
    from tests.gpu.conftest import Inner


def test_a_gpu_that_another_process_uses_is_busy(inner: Inner) -> None:
    if not make_vendor("cuda").discover():
        pytest.skip("needs a GPU")
    inner.write(test_it="import pytest\n\n\n@pytest.mark.devices\ndef test_it(): ...\n")
    code = "import torch; kept = torch.ones(2**30, device='cuda'); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "up\n"
        run = inner.run("--accel=cuda", "-o", "accel_busy=skip", "-rs")
        user.communicate("\n")
    run.assert_outcomes(skipped=1)
    run.stdout.fnmatch_lines(["accel: cuda, no devices*; left out as busy: *"])
    inner.run("--accel=cuda").assert_outcomes(passed=1)
