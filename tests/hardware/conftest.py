"""Fixtures that run code in a separate process: on a fake machine with NVIDIA GPUs, or with packages of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import fake_driver

OnMachine = Callable[..., Any]
Run = Callable[..., list[str]]
_GIB = 1024**3


def gpu(number: int, *more: str, name: str = "NVIDIA T4") -> tuple[str, ...]:
    """Return the facts of a GPU. No real device is in its PCI domain."""
    return (f"gpu GPU-{number}", f"name {name}", f"memory {16 * _GIB} {15 * _GIB}", f"pci ff00 {number} 0", *more)


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Provide folders with libraries.

    `new` has the fake NVML, and `cuda` also a fake libcuda. No library can be loaded from `none`.
    """
    if fake_driver.compiler() is None:
        pytest.skip("needs Linux and a C compiler for the fake driver")
    root = tmp_path_factory.mktemp("drivers")
    fake_driver.build(root / "new" / fake_driver.NVML, "libnvidia-ml.c")
    fake_driver.build(root / "cuda" / fake_driver.NVML, "libnvidia-ml.c")
    fake_driver.build(root / "cuda" / "libcuda.so.1", "libcuda.c")
    # An empty file cannot be loaded. It hides a library that the machine may have.
    (root / "none").mkdir()
    for broken in ("new/libcuda.so.1", "none/libcuda.so.1", f"none/{fake_driver.NVML}"):
        (root / broken).touch()
    return {folder: root / folder for folder in ("new", "cuda", "none")}


@pytest.fixture
def on_machine(drivers: dict[str, Path], tmp_path: Path) -> OnMachine:
    """Provide a function that runs Python code with a fake driver and returns the JSON that the code prints.

    `facts` describe the machine, in the format of ``fake_nvml/libnvidia-ml.c``.
    """

    def run(code: str, *facts: str, driver: str = "new", **environ: str) -> Any:
        return fake_driver.run(drivers[driver], tmp_path / "machine.txt", code, *facts, **environ)

    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Provide a function that runs Python code which can import `files`, and returns the lines that it prints."""

    def run(code: str, files: dict[str, str], *arguments: str, **environ: str) -> list[str]:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
            for folder in file.relative_to(tmp_path).parents[:-1]:
                (tmp_path / folder / "__init__.py").touch()
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(fake_driver.ROOT), str(tmp_path)]), **environ},
            cwd=fake_driver.ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run
