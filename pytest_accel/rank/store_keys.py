"""Changes that a test makes to the world's store and the next test would notice. Runs in ranks only.

The store lives as long as the world, so the next test would find a key that this test has left in the store of the
default process group. It cannot be deleted: no rank knows when the others have begun the next test, which may set it
again. Keys that fixtures of a wider scope set are theirs, and torch numbers its own.

The connection to the store also lives as long as the world. torch's server ends it when a key or a value is too large,
and torch does not connect again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from sys import _getframe
from typing import TYPE_CHECKING, Any

from pytest_accel.core import torch_api

if TYPE_CHECKING:
    from torch.distributed import Store

_LARGEST_VALUE = 8 << 20
"""Maximum size of a value in bytes (MAX_PAYLOAD_LEN in torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp)."""
_LARGEST_KEY = 8000
"""Maximum size of a key in bytes: MAX_STRING_LEN in the same file, less about 190 bytes for prefixes."""
_OTHERS = ("torch.", f"{__name__.partition('.')[0]}.")
"""Packages whose keys belong to no test."""


class StoreKeys:
    """The keys that the running test has left in the store, and the state of the connection; one for each rank."""

    def __init__(self) -> None:
        self._left: set[tuple[Store, str]] = set()
        self._in_test = False
        self._store: Store | None = None
        """The world's store, without a prefix."""
        self._has_limits = True
        """True if the world's store refuses large keys and values."""
        self._lost = False
        """True if the connection to the store has failed, or is about to. It stays so as long as the world lives."""
        self.refused: str | None = None
        """Description of the first key or value that was too large for the world's store; None: there was none."""

    def install(self, store: Store) -> None:
        """Watch the use of the world's `store`, and note the keys that are set from now on."""
        import torch.distributed as dist

        self._store = store
        self._has_limits = torch_api.serves_with_libuv()
        for name in torch_api.store_setters():
            self._replace(dist.Store, name, self._note)
        for name in torch_api.store_getters():
            self._replace(dist.Store, name, lambda store, keys: None)
        self._replace(dist.Store, "delete_key", lambda store, keys: self._left.difference_update(_pairs(store, keys)))

    def _replace(self, owner: Any, name: str, then: Any) -> None:
        import torch.distributed as dist

        original = getattr(owner, name)
        lost: type[Exception] = dist.DistNetworkError

        @wraps(original)
        def method(store: Store, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            keys = [named[name] for name in ("key", "keys") if name in named]
            arguments = (*args, *keys, *(value for name, value in named.items() if name not in ("key", "keys")))
            refused = _refused(*arguments) if self._has_limits else None
            if refused is not None and _without_prefix(store) is self._store:
                self.refused = self.refused or refused
            try:
                result = original(store, *args, **named)
            except lost:
                self._lost |= _without_prefix(store) is self._store
                raise
            if self._in_test and not _getframe(1).f_globals.get("__name__", "").startswith(_OTHERS):
                then(store, arguments[0])
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
        """End the test, and return whether the next test would notice what has been done to the store."""
        self._in_test = False
        return bool(self._left) or self._lost or self.refused is not None


def _pairs(store: Store, keys: Any) -> set[tuple[Store, str]]:
    return {(store, key) for key in ([keys] if isinstance(keys, str) else keys)}


def _is_of_default_group(store: Any) -> bool:
    """Return whether keys of `store` are in the store of the default process group, possibly with a prefix."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return False
    default = torch_api.default_store()
    while store is not default and isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store is default


def _without_prefix(store: Any) -> Any:
    """Return the store in which `store`, which may have prefixes, keeps its keys."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _refused(keys: str | Sequence[str], *others: Any) -> str | None:
    """Return a description of a key or value for which torch's server ends the connection; None if it accepts all."""
    for key in _texts(keys):
        if (size := _size(key)) > _LARGEST_KEY:
            return f"a key has {size:,} bytes; at most {_LARGEST_KEY:,} are allowed"
    for value in chain.from_iterable(map(_texts, others)):
        if (size := _size(value)) > _LARGEST_VALUE:
            return f"a value has {size:,} bytes; at most {_LARGEST_VALUE:,} (8 MiB) are allowed"
    return None


def _texts(argument: Any) -> Iterable[str | bytes]:
    """Return the texts in `argument` of a store's method, which may be one text, several, or something else."""
    if isinstance(argument, (str, bytes)):
        return (argument,)
    return argument if isinstance(argument, (list, tuple)) else ()


def _size(text: str | bytes) -> int:
    return len(text if isinstance(text, bytes) or text.isascii() else text.encode(errors="replace"))
