"""The search for the module whose globals keep an object. Runs in ranks only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from gc import get_objects, get_referrers, is_tracked, unfreeze
from types import FrameType, ModuleType

_REGISTRIES = (
    *("threading", "subprocess", "weakref", "multiprocessing.process", "multiprocessing.util"),
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
        id(vars(module)): module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)
    }
    seen = {id(objects)}
    for name in _REGISTRIES:
        if name in sys.modules:
            seen |= {id(vars(sys.modules[name])), *map(id, vars(sys.modules[name]).values())}
    found = [*objects, *_untracked_dicts(objects)]
    for _ in range(_LONGEST_PATH):
        seen |= {id(found), *map(id, found)}
        if not 0 < len(found) <= _MOST:
            return None
        found = [one for one in get_referrers(*found) if id(one) not in seen and not _is_passing(one)]
        for one in found:
            if id(one) in modules:
                return modules[id(one)]
    return None


def _untracked_dicts(objects: Sequence[object]) -> list[object]:
    """Return the dictionaries that hold one of `objects` and that the collector does not know.

    It knows no dictionary that has only objects of types without references, as classes written in C++ are.
    """
    ids = {id(one) for one in objects if not is_tracked(one)}
    if not ids:
        return []
    values = (value for one in get_objects() if type(one) is dict for value in list(one.values()))
    unknown = {id(value): value for value in values if type(value) is dict and not is_tracked(value)}
    return [one for one in unknown.values() if not ids.isdisjoint(map(id, list(one.values())))]


def _is_passing(referrer: object) -> bool:
    """Return whether `referrer` is a frame or an object of this package."""
    return type(referrer) is FrameType or type(referrer).__module__.startswith(_OWN)
