"""The search for the module whose globals keep an object. Runs in ranks only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from gc import get_objects, get_referents, get_referrers, is_tracked, unfreeze
from types import FrameType, ModuleType
from typing import Any

_REGISTRIES = (
    *("threading", "subprocess", "weakref", "multiprocessing.process", "multiprocessing.util"),
    *("multiprocess.process", "multiprocess.util"),
    *("concurrent.futures.thread", "concurrent.futures.process", "torch.distributed.distributed_c10d"),
)
"""Modules that list all threads, processes or process groups in their globals. They keep none for the suite."""
_OWN = f"{__name__.partition('.')[0]}."
_LONGEST_PATH = 10
"""Number of references between a global and the object, for example `client.pool.workers[0]`."""
_MOST = 100
"""Number of objects whose referrers are looked for at once. The search looks at each object of the process as often."""


def module_that_holds(objects: Sequence[object]) -> ModuleType | None:
    """Return a module whose globals refer to one of `objects`, possibly through other objects; None if none does.

    Frames do not count: those of the test have ended. Neither do the objects of this package.
    """
    unfreeze()  # The collector does not look at what the fork server has imported.
    modules = {
        id(_globals_of(module)): module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)
    }
    seen = {id(objects)}
    for name in _REGISTRIES:
        if name in sys.modules:
            names = _globals_of(sys.modules[name])
            seen |= {id(names), *map(id, list(names.values()))}
    found = [*objects, *_untracked_containers(objects)]
    for _ in range(_LONGEST_PATH):
        seen |= {id(found), *map(id, found)}
        if not 0 < len(found) <= _MOST:
            return None
        found = [one for one in get_referrers(*found) if id(one) not in seen and not _is_passing(one)]
        for one in found:
            if id(one) in modules:
                return modules[id(one)]
    return None


def _globals_of(module: ModuleType) -> dict[str, Any]:
    """Return the globals of `module`. ``vars`` would import a lazy module."""
    found: dict[str, Any] = vars(ModuleType)["__dict__"].__get__(module)
    return found


def _untracked_containers(objects: Sequence[object]) -> list[object]:
    """Return the dictionaries and tuples that hold one of `objects` and that the collector does not know.

    It knows none that has only objects of types without references, as classes written in C++ are.
    """
    ids = {id(one) for one in objects if not is_tracked(one)}
    if not ids:
        return []
    unknown = {
        id(value): value
        for one in get_objects()
        for value in get_referents(one)
        # `in` would call a comparison that a metaclass of the suite defines.
        if (type(value) is dict or type(value) is tuple) and not is_tracked(value)
    }
    return [one for one in unknown.values() if not ids.isdisjoint(map(id, get_referents(one)))]


def _is_passing(referrer: object) -> bool:
    """Return whether `referrer` is a frame or an object of this package."""
    # A class of the suite may define `__module__` as it likes.
    return type(referrer) is FrameType or str(getattr(type(referrer), "__module__", "")).startswith(_OWN)
