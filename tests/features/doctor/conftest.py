"""The commands ``info`` and ``doctor``, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pytest_accel.core import launcher_env

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m pytest_accel`` without the inherited masks and variables of launchers."""
    hidden = launcher_env.variables_here(os.environ)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith("_VISIBLE_DEVICES") and name not in hidden
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest_accel", *arguments],
        cwd=ROOT,
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
