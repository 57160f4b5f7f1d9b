"""Clusters, as the starter of several machines uses them: they reserve places for worlds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from pytest_accel.core.world_key import WorldKey
from pytest_accel.pool.starter import PlaceError


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a world that a cluster has reserved."""

    request_id: int
    machines: tuple[int, ...]
    """The machine of each rank, in ascending order: its index in `Layout.machines`, and the number of its server."""
    devices: Mapping[int, tuple[str, ...]]
    """By machine: the values of the kind's mask variable for the reserved devices, as a process without that mask
    numbers them (``0``, ``3``, ``GPU-...``). Empty for a world without devices."""


class Cluster(Protocol):
    """Reserves places for worlds. The methods never block. No callback is called in the caller's thread."""

    def place(
        self,
        key: WorldKey,
        on_place: Callable[[Place], None],
        on_wait: Callable[[str], None],
        on_failure: Callable[[PlaceError], None],
        avoided: Collection[int] = (),
    ) -> int:
        """Request a place for a world of `key`, without the machines `avoided`; return the id of the request.

        Call `on_place` with the place, or `on_failure` with the error if there can be none. Before that, call `on_wait`
        with the reason once it is known that the request has to wait, and again if the reason changes.
        """

    def cancel(self, request_id: int) -> None:
        """Cancel a request; no-op if it has been answered."""

    def release(self, place: Place) -> None:
        """Give a place back."""
