"""A machine with NVIDIA GPUs, made at the boundary: a driver library that reads its GPUs from a text file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_SOURCES = Path(__file__).parent / "fake_nvml"
_ROOT = Path(__file__).parents[2]

OnMachine = Callable[..., Any]


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of driver libraries: `new`, `old` (lacks what old drivers lack), `cuda` (new, with libcuda), `none`."""
    if sys.platform != "linux":
        pytest.skip("the fake driver is a Linux library")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for the fake driver")
    root = tmp_path_factory.mktemp("drivers")

    def build(folder: str, library: str, source: str, *options: str) -> None:
        target = root / folder / library
        target.parent.mkdir(exist_ok=True)
        subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", target, _SOURCES / source], check=True)

    build("new", "libnvidia-ml.so.1", "libnvidia-ml.c")
    build("old", "libnvidia-ml.so.1", "libnvidia-ml.c", "-DOLD_DRIVER")
    build("cuda", "libnvidia-ml.so.1", "libnvidia-ml.c")
    build("cuda", "libcuda.so.1", "libcuda.c")
    # A library that cannot be loaded stands before one that the machine may have.
    (root / "none").mkdir()
    for broken in ("new/libcuda.so.1", "old/libcuda.so.1", "none/libcuda.so.1", "none/libnvidia-ml.so.1"):
        (root / broken).touch()
    return {folder: root / folder for folder in ("new", "old", "cuda", "none")}


@pytest.fixture
def on_machine(drivers: dict[str, Path], tmp_path: Path) -> OnMachine:
    """Runs Python code in a process with a fake driver whose machine is `facts`; gives the JSON that it prints."""

    def run(code: str, *facts: str, driver: str = "new", **environ: str) -> Any:
        machine = tmp_path / "machine.txt"
        machine.write_text("".join(f"{fact}\n" for fact in facts))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**inherited, "LD_LIBRARY_PATH": str(drivers[driver]), "FAKE_NVML": str(machine), **environ},
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
