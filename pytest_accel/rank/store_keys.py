"""Keys that a test leaves in the store of the default process group. Runs in ranks only.

The store lives as long as the world, so the next test would find the key. It cannot be deleted: no rank knows when the
others have begun the next test, which may set it again. Keys that fixtures of a wider scope set are theirs, and torch
numbers its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from sys import _getframe
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

_SETTERS = ("set", "add", "append", "compare_set", "multi_set", "queue_push")
_OTHERS = ("torch.", f"{__name__.partition('.')[0]}.")
"""Packages whose keys belong to no test."""


class StoreKeys:
    """The keys that the running test has left in the store of the default process group; one for each rank."""

    def __init__(self) -> None:
        self._left: set[tuple[Store, str]] = set()
        self._in_test = False

    def install(self) -> None:
        """Note the keys that are set from now on."""
        import torch.distributed as dist

        for name in _SETTERS:
            self._replace(dist.Store, name, self._note)
        self._replace(dist.Store, "delete_key", lambda store, keys: self._left.difference_update(_pairs(store, keys)))

    def _replace(self, owner: Any, name: str, then: Any) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def method(store: Store, key: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            result = original(store, key, *args, **named)
            if self._in_test and not _getframe(1).f_globals.get("__name__", "").startswith(_OTHERS):
                then(store, key)
            return result

        setattr(owner, name, method)

    def _note(self, store: Store, keys: Any) -> None:
        if _is_of_default_group(store):
            self._left |= _pairs(store, keys)

    def begin(self) -> None:
        """Begin a test."""
        self._left.clear()
        self._in_test = True

    @contextmanager
    def wider_fixture(self) -> Iterator[None]:
        """Ignore the keys that are set in the ``with`` block."""
        in_test, self._in_test = self._in_test, False
        try:
            yield
        finally:
            self._in_test = in_test

    def end(self) -> bool:
        """End the test, and return whether it has left keys."""
        self._in_test = False
        return bool(self._left)


def _pairs(store: Store, keys: Any) -> set[tuple[Store, str]]:
    return {(store, key) for key in ([keys] if isinstance(keys, str) else keys)}


def _is_of_default_group(store: Any) -> bool:
    """Return whether keys of `store` are in the store of the default process group, possibly with a prefix."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return False
    default = dist.distributed_c10d._get_default_store()
    while store is not default and isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store is default
