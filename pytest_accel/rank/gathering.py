"""Exchange of values between the ranks of a test through the world's store, without collective and process group."""

from __future__ import annotations

from pytest_accel.rank.context import RankContext
from pytest_accel.rank.signed_store import SignedStore


class Gathering:
    """This rank's side of an exchange. All ranks make the same calls in a test; the next test starts anew."""

    def __init__(self, context: RankContext, name: str) -> None:
        """`name` distinguishes the exchange from others, also in reports of ranks that wait in it."""
        self._context, self._name = context, name
        self._unread: list[str] = []
        """Names of this rank's values that other ranks may not have read."""

    @property
    def _store(self) -> SignedStore:
        assert self._context.signed_store is not None  # Made before the first test.
        return self._context.signed_store

    def put(self, value: bytes) -> list[str]:
        """Set this rank's value of the next call, without waiting; return the names of the values of all ranks."""
        context, calls = self._context, self._context.exchanges
        calls[self._name] += 1
        if calls[self._name] == 1:  # All ranks have finished the last test, so they have read its values.
            self._delete(self._unread)
        names = [f"{self._name}/{context.tests}/{calls[self._name]}/{rank}" for rank in range(context.spec.ranks)]
        self._store.set(names[context.rank], value)
        self._unread.append(names[context.rank])
        return names

    def _delete(self, names: list[str]) -> None:
        for name in names:
            self._store.delete(name)
        names.clear()

    def __call__(self, value: bytes) -> list[bytes]:
        """Return the values of all ranks, ordered by rank."""
        __tracebackhide__ = True
        names, values = self.put(value), []
        self._context.awaited_exchange = self._name
        try:
            for name in names:  # A comprehension would be a frame of the traceback.
                values.append(self._store.get(name))
        finally:
            self._context.awaited_exchange = None
        # All ranks have reached this call, so all have read the values of the calls before it.
        own = self._unread.pop()
        self._delete(self._unread)
        self._unread.append(own)
        return values
