"""Fixtures that run code in a separate process, on a fake machine with NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hardware import fake_driver

OnMachine = Callable[..., Any]


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
