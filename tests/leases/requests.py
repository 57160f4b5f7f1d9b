"""Requests to brokers, as tests make them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.broker import Broker
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.policy import Lease, Request

ME = Holder.here("tests/test_x.py::test_one")
_NUMBERS = itertools.count(1)


def demand_of(holder: Holder = ME) -> WorldDemand:
    """Return a demand of `holder`, for a world about which a broker knows nothing."""
    return WorldDemand(WorldKey("sim", None, 1, grouped=False), holder)


def submit(
    broker: Broker,
    candidates: Sequence[str],
    count: int,
    on_grant: Callable[[Lease], None],
    *,
    holder: Holder = ME,
    slots: int = 0,
    ties: Sequence[tuple[str, str, float]] = (),
    parts: Sequence[int] = (),
    sets: int = 1,
    on_failure: Callable[[Exception], None] | None = None,
) -> int:
    """Submit a request; return its id, which no other has. Without `on_failure`, an error is raised."""

    def answer(lease: Lease | Exception) -> None:
        if not isinstance(lease, Exception):
            on_grant(lease)
        elif on_failure is not None:
            on_failure(lease)
        else:
            raise lease

    request = Request(next(_NUMBERS), tuple(candidates), count, slots, tuple(ties), tuple(parts), sets)
    broker.submit(request, demand_of(holder), answer)
    return request.id
