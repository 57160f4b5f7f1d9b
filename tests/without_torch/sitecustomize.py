"""Hides torch from an interpreter, which imports this module when it starts (`Suite.without_torch`)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_find_spec = PathFinder.find_spec


class _WithoutTorch:
    """No function, since pytest makes it an attribute of a class."""

    def __call__(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if name.partition(".")[0] == "torch" else _find_spec(name, path, target)


PathFinder.find_spec = _WithoutTorch()  # type: ignore[assignment, method-assign]
