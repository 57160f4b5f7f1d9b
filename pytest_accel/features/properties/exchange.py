"""Exchange of records between the ranks of a test, step by step. Runs in ranks only.

The ranks exchange records through the world's store, which also works across machines. Records are JSON and signed
(`signed_store.py`): a record that another process has written is not used, and ends the exchange.
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
"""Maximum size of one record, in bytes."""
_SHORTEST_SLEEP = 0.0002
_LONGEST_SLEEP = 0.02
"""Seconds between two requests to the store: the first pause, and the longest one."""


class LateRanks(Exception):
    """Some ranks have not reached a step before the timeout."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class ExchangeError(Exception):
    """The exchange is broken: the store is lost, a record is too large, or another process has written to the store."""


class Exchange:
    """This rank's side of the exchange. All ranks take the same steps, each until it leaves. The `Lockstep` owns it."""

    def __init__(self, store: SignedStore, name: str, rank: int, size: int) -> None:
        """`name` is the prefix of the exchange's keys in `store`; `size` is the number of ranks."""
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self.steps = 0
        """Number of steps that this rank has begun."""

    def all_gather(self, record: Mapping[str, Any], timeout: float | None = None) -> list[dict[str, Any]]:
        """Take a step: write `record` as this rank's, and return the records of all ranks, in the order of the ranks.

        Raise :class:`LateRanks` if a rank does not reach the step within `timeout` seconds (None: no limit), and
        :class:`ExchangeError` if the exchange is broken.
        """
        try:
            data = self._put(record)
            keys = [self._key(rank) for rank in range(self._size)]
            if timeout is not None:
                self._wait_for(keys, timeout)
            found = [data if rank == self._rank else self._store.get(key) for rank, key in enumerate(keys)]
            # All ranks have reached this step, so all have read the records of the previous one.
            self._store.delete(self._key(self._rank, self.steps - 1))
        except RuntimeError as error:  # Raised by torch: the process of the store has exited.
            raise ExchangeError(f"lost the store of the test's ranks: {error}") from error
        except ForgedValueError as error:
            raise ExchangeError(str(error)) from None
        return [json.loads(data) for data in found]

    def leave(self, record: Mapping[str, Any]) -> None:
        """Write `record` for the ranks that take one more step than this one; do not wait for them."""
        with contextlib.suppress(RuntimeError):  # The process of the store has exited, so no rank can read it.
            self._put(record)

    def _put(self, record: Mapping[str, Any]) -> bytes:
        data = json.dumps(record).encode()
        if len(data) > LARGEST:
            raise ExchangeError(f"a record of {len(data)} bytes is too large: {LARGEST} are allowed")
        self.steps += 1
        self._store.set(self._key(self._rank), data)
        return data

    def _wait_for(self, keys: list[str], timeout: float) -> None:
        """Poll the store until all `keys` are set. torch's own wait writes to stderr if it times out."""
        began, sleep = monotonic(), _SHORTEST_SLEEP
        while not self._store.check(keys):
            if monotonic() >= began + timeout:
                raise LateRanks([rank for rank, key in enumerate(keys) if not self._store.check([key])])
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST_SLEEP)

    def _key(self, rank: int, step: int | None = None) -> str:
        return f"{self._name}/{self.steps if step is None else step}/{rank}"
