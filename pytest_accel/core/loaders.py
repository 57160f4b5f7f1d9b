"""How modules are loaded: by the interpreter's own loaders, or by others that may change them."""

from __future__ import annotations

from typing import Any

INTERPRETERS = {"_frozen_importlib", "_frozen_importlib_external", "zipimport"}
"""Modules of the interpreter's own finders and loaders."""


def loads_plainly(spec: Any) -> bool:
    """Return whether the module of `spec` is loaded by one of the interpreter's own loaders."""
    loader = getattr(spec, "loader", None)
    kind = loader if isinstance(loader, type) else type(loader)
    return kind.__module__ in INTERPRETERS
