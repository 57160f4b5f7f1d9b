"""Exchange of values between the ranks of a test, by the world's store: no collective, and without a process group."""

from __future__ import annotations

from datetime import timedelta

from pytest_accel.rank.context import RankContext


class Gathering:
    """This rank's side of an exchange. All ranks make the same calls in a test; the next test starts anew."""

    def __init__(self, context: RankContext, name: str) -> None:
        """`name` distinguishes the exchange from others."""
        assert context.signed_store is not None
        self._context, self._name, self._store = context, name, context.signed_store
        # Calls are numbered within each test. A rank that fails may make fewer calls than the others.
        self._test = self._calls = 0
        self._own: str | None = None

    def put(self, value: bytes) -> list[str]:
        """Set this rank's value of the next call, without waiting; return the names of the values of all ranks."""
        if self._context.tests != self._test:
            self._test, self._calls = self._context.tests, 0
        self._calls += 1
        names = [f"{self._name}/{self._test}/{self._calls}/{rank}" for rank in range(self._context.spec.ranks)]
        self._store.set(names[self._context.rank], value)
        return names

    def __call__(self, value: bytes, timeout: timedelta | None = None) -> list[bytes]:
        """Return the values of all ranks, ordered by rank; raise RuntimeError after `timeout` (None: no limit)."""
        __tracebackhide__ = True
        names = self.put(value)
        if timeout is not None:
            self._store.wait(names, timeout)
        values = [self._store.get(name) for name in names]
        # All ranks have reached this call, so all have read the values of the previous call.
        if self._own is not None:
            self._store.delete(self._own)
        self._own = names[self._context.rank]
        return values
