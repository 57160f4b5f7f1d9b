"""A machine with NVIDIA GPUs, made at the boundary: a driver library that reads its GPUs from a text file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NVML = "libnvidia-ml.so.1"
_SOURCES = Path(__file__).parent / "fake_nvml"


def compiler() -> str | None:
    """The C compiler; None where there is none or where the library could not be used."""
    return (shutil.which("gcc") or shutil.which("cc")) if sys.platform == "linux" else None


def build(target: Path, source: str, *options: str) -> None:
    """Make the library `target` from a file of ``fake_nvml``."""
    target.parent.mkdir(exist_ok=True)
    command = [compiler() or "cc", "-shared", "-fPIC", *options, "-o", str(target), str(_SOURCES / source)]
    subprocess.run(command, check=True)


def run(folder: Path, machine: Path, code: str, *facts: str, **environ: str) -> Any:
    """Runs Python code with the driver in `folder`, whose machine is `facts`, put into the file `machine`.

    Gives the JSON that the code prints; AssertionError with what it wrote to stderr where it fails.
    """
    machine.write_text("".join(f"{fact}\n" for fact in facts))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(machine), **environ},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
