"""An exchange of records between the ranks of a test, step by step. Runs in ranks only.

The records go over the world's store, which ranks on several machines have as well. They are JSON: what another
process has written into the store is data and never code.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from pytest_accel.core.clock import monotonic
from pytest_accel.rank.signed_store import ForgedValueError, SignedStore

LARGEST = 1 << 20
"""Bytes of one record."""
_SHORTEST_NAP = 0.0002
_LONGEST_NAP = 0.02


class LateRanks(Exception):
    """Some ranks have not come to a step in time."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class ExchangeError(Exception):
    """The exchange is broken: a rank that is gone, or a record that is none."""


class Exchange:
    """One rank's end of the exchange. All ranks take the same steps, or leave."""

    def __init__(self, store: SignedStore, name: str, rank: int, size: int) -> None:
        """`name` begins the names of all that the ranks keep in `store` for it."""
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self.steps = 0
        """The steps that this rank has begun."""

    def swap(self, record: Mapping[str, Any], patience: float | None = None) -> list[dict[str, Any]]:
        """Return the records of all ranks in this step, in their order; this rank's is `record`.

        Wait without a limit if `patience` is None; else raise :class:`LateRanks` after that many seconds. Raise
        :class:`ExchangeError` if the exchange is broken.
        """
        try:
            data = self._put(record)
            keys = [self._key(rank) for rank in range(self._size)]
            if patience is not None:
                self._await(keys, patience)
            found = [data if rank == self._rank else self._store.get(key) for rank, key in enumerate(keys)]
            # All have come to this step, so all have read the one before.
            self._store.delete(self._key(self._rank, self.steps - 1))
        except RuntimeError as error:  # torch's own: the store's process is gone.
            raise ExchangeError(f"lost the store of the test's ranks: {error}") from error
        except ForgedValueError as error:
            raise ExchangeError(str(error)) from None
        return [_read(rank, data) for rank, data in enumerate(found)]

    def leave(self, record: Mapping[str, Any]) -> None:
        """Give `record` to the ranks that take a step more than this one."""
        with contextlib.suppress(RuntimeError):  # The store's process is gone: there is nobody to tell.
            self._put(record)

    def _put(self, record: Mapping[str, Any]) -> bytes:
        data = json.dumps(record).encode()
        if len(data) > LARGEST:
            raise ExchangeError(f"a record of {len(data)} bytes is too large: {LARGEST} are allowed")
        self.steps += 1
        self._store.set(self._key(self._rank), data)
        return data

    def _await(self, keys: list[str], patience: float) -> None:
        """Wait for `keys` by asking for them: a wait of torch's that times out complains on the standard error."""
        deadline, nap = monotonic() + patience, _SHORTEST_NAP
        while not self._store.check(keys):
            if monotonic() >= deadline:
                raise LateRanks([rank for rank, key in enumerate(keys) if not self._store.check([key])])
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def _key(self, rank: int, step: int | None = None) -> str:
        return f"{self._name}/{self.steps if step is None else step}/{rank}"


def _read(rank: int, data: bytes) -> dict[str, Any]:
    if len(data) > LARGEST:
        raise ExchangeError(f"the record of rank {rank} is too large: {len(data)} bytes; {LARGEST} are allowed")
    try:
        record = json.loads(data)
    except ValueError as error:
        raise ExchangeError(f"the record of rank {rank} is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise ExchangeError(f"the record of rank {rank} is no object: {record!r:.100}")
    return record
