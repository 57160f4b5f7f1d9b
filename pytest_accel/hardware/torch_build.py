"""Detection of the accelerator platforms that torch was built for, without importing torch."""

from __future__ import annotations

import importlib.util
import re
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from pytest_accel.hardware.sysfs import read_text

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
