"""A session's brokers: one for each kind of device, and one for the ranks that run on the CPU without a lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_accel.leases.broker import Broker
from pytest_accel.leases.locks import DeviceLocks


class Brokers:
    """Makes each broker when it is first asked for. Not thread-safe: the pool calls it under its own lock."""

    def __init__(
        self, devices_of: Callable[[str], Sequence[str]], slots: int, on_wanted: Callable[[str | None, int], None]
    ) -> None:
        """`devices_of` gives the ids of a kind; ``on_wanted(kind, lease)`` has kind None for a lease on CPU slots."""
        self.slots = slots
        self._devices_of = devices_of
        self._on_wanted = on_wanted
        self._made: dict[str | None, Broker] = {}

    def of(self, kind: str | None) -> Broker:
        """The broker of the devices of `kind`; None: of the CPU slots."""
        if kind not in self._made:
            devices = () if kind is None else self._devices_of(kind)
            locks = None if kind is None else DeviceLocks()
            slots = self.slots if kind is None else 0
            self._made[kind] = Broker(devices, slots, locks, lambda lease: self._on_wanted(kind, lease))
        return self._made[kind]

    def close(self) -> None:
        """Give all leases back."""
        for broker in self._made.values():
            broker.close()
