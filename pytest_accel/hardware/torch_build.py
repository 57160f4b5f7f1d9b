"""What the installed torch was built for, without importing it."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

_LINE = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=\s*'([^']*)'", re.MULTILINE)


@cache
def built_for() -> frozenset[str]:
    """Of ``cuda``, ``hip`` and ``xpu`` those that ``torch/version.py``, which its build writes, gives a version of.

    Empty where there is no torch.
    """
    return frozenset(versions())


def versions() -> dict[str, str]:
    """The same, each with that version: ``{"cuda": "12.8"}``."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    return versions_in(Path(spec.origin).with_name("version.py"))


def builds_in(version_file: Path) -> frozenset[str]:
    """What `built_for` is, of one file; empty where it cannot be read."""
    return frozenset(versions_in(version_file))


def versions_in(version_file: Path) -> dict[str, str]:
    """What `versions` is, of one file; empty where it cannot be read."""
    try:
        text = version_file.read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: version for name, version in _LINE.findall(text) if version}
