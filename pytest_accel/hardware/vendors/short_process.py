"""Short processes that ask a device's driver or torch. Asking in this process would start a runtime in it.

A runtime reads its mask only once, and cannot be used in a process that is forked afterwards.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_accel.core.interpreter import python_command

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
