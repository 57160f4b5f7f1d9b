"""Distinction of modules that Python's own loaders load from those of other loaders, which may change the code."""

from __future__ import annotations

from typing import Any

INTERPRETERS = {"_frozen_importlib", "_frozen_importlib_external", "zipimport"}
"""Names of the modules that define Python's own finders and loaders."""


def loads_plainly(spec: Any) -> bool:
    """Return whether the module of `spec` is loaded by one of Python's own loaders."""
    loader = getattr(spec, "loader", None)
    kind = loader if isinstance(loader, type) else type(loader)
    return kind.__module__ in INTERPRETERS
