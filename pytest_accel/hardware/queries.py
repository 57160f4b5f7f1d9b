"""Questions to drivers and to torch that start no runtime in this process.

The file with torch's version answers them, or a short process. A runtime reads its mask only once, and cannot be used
in a process that is forked afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from pytest_accel.core.interpreter import python_command
from pytest_accel.hardware.kernel_files import read_text

_TIMEOUT = 60.0
"""Seconds. Without a persistence daemon NVIDIA's driver needs several to initialise many GPUs, and torch a few."""


def answer(command: Sequence[str], environ: Mapping[str, str], timeout: float = _TIMEOUT) -> str:
    """Return what `command` prints, run with `environ`.

    Raise OSError, with the last line of its stderr, if it fails or does not end within `timeout` seconds.
    """
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {timeout:g} seconds") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise OSError(lines[-1])
    return done.stdout


def ask_torch(source: str, environ: Mapping[str, str], timeout: float = _TIMEOUT) -> Any:
    """Return `answer`, a variable of JSON values that the Python code `source` sets in a process that may load torch.

    Raise OSError if there is none, see `answer`.
    """
    # Only the last line counts: modules that the code imports may print something before.
    source = f"{source}\nimport json\nprint()\nprint(json.dumps(answer))"
    output = answer(python_command(source, path=sys.path), environ, timeout)
    try:
        return json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        raise OSError("its output cannot be read") from None


_LINE = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=\s*'([^']*)'", re.MULTILINE)


def lacks(platform: str, label: str, kind: str) -> str | None:
    """Return a text if the installed torch is not built for `platform`, whose name for people is `label`, else None."""
    if platform in versions():
        return None
    if _find() is None:
        return f"torch is not installed; --accel {kind} uses them without it"
    return f"torch is not built for {label}"


def versions() -> dict[str, str]:
    """Return the versions of the platforms that torch was built for: ``{"cuda": "12.8"}``; empty without torch."""
    spec = _find()
    if spec is None or spec.origin is None:
        return {}
    text = read_text(Path(spec.origin).with_name("version.py"))
    return {name: version for name, version in _LINE.findall(text) if version}


def _find() -> ModuleSpec | None:
    """Return the spec of the installed torch, or None."""
    try:
        return importlib.util.find_spec("torch")
    except ValueError:  # The suite has put a stub without a spec into `sys.modules`.
        return PathFinder.find_spec("torch")
