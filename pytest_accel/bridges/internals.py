"""What bridges take of another plugin: checked, so that an unknown release is refused and gives no wrong results."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest


def take(plugin: str, module: str, name: str) -> Any:
    """Return what `module`, of `plugin`, has under `name`. Raise `pytest.UsageError` if there is no such thing."""
    found: Any
    try:
        found = import_module(module)
    except ImportError:
        found = None
    require(plugin, found, name)
    return getattr(found, name)


def require(plugin: str, owner: object, *names: str) -> None:
    """Raise `pytest.UsageError` if `owner`, an object of `plugin`, lacks one of `names`."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise pytest.UsageError(
            f"pytest-accel does not know this release of {plugin}, which has no {', '.join(missing)}: "
            "install another release, or run marked tests without it"
        )
