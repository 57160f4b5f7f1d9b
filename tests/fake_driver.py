"""A fake NVIDIA driver: a library that reads the GPUs of its machine from a text file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NVML = "libnvidia-ml.so.1"
_SOURCES = Path(__file__).parent / "hardware" / "fake_nvml"


def compiler() -> str | None:
    """Return the path of the C compiler, or None if there is none or the system is not Linux."""
    return (shutil.which("gcc") or shutil.which("cc")) if sys.platform == "linux" else None


def build(target: Path, source: str) -> None:
    """Compile the library `target` from a file of ``fake_nvml``."""
    target.parent.mkdir(exist_ok=True)
    command = [compiler() or "cc", "-shared", "-fPIC", "-o", str(target), str(_SOURCES / source)]
    subprocess.run(command, check=True)


def run(folder: Path, machine: Path, code: str, *facts: str, **environ: str) -> Any:
    """Run Python code with the driver in `folder`, and return the JSON that the code prints.

    The `facts` describe the machine and are written to the file `machine`. If the code fails, raise AssertionError with
    its stderr.
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
