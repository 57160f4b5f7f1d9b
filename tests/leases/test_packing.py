"""Tests of the broker with shared devices: few devices are used, and no device is granted beyond its capacity."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.broker import Broker
from pytest_accel.leases.policy import Lease
from tests.leases.requests import submit

SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0)


def random_shares(seed: int) -> list[int]:
    draw = random.Random(seed)
    count = draw.randint(8, 60)
    if draw.random() < 0.2:
        return [int(WHOLE * draw.uniform(0.02, 1.0))] * count
    return [
        int(WHOLE * (draw.choice(SHARES) if draw.random() < 0.5 else draw.uniform(0.02, 1.0))) for _ in range(count)
    ]


def used_parts(leases: Sequence[Lease]) -> Counter[str]:
    total: Counter[str] = Counter()
    for lease in leases:
        total.update(dict(lease.takes()))
    return total


def devices_used(shares: Sequence[int]) -> int:
    """Return the number of devices that a broker uses for `shares`, which are requested one after the other."""
    devices = [f"d{number}" for number in range(len(shares))]
    broker = Broker(devices, 0, None, lambda lease: None)
    leases: list[Lease] = []
    for share in shares:
        submit(broker, devices, 1, leases.append, parts=[share] * len(devices))
    broker.close()
    total = used_parts(leases)
    assert len(leases) == len(shares)
    assert max(total.values()) <= WHOLE
    return len(total)


def lower_bound(sizes: Sequence[int]) -> int:
    """Return a lower bound for the number of devices: Martello and Toth's L2, and a bound by count.

    The latter: at most K shares larger than 1/(K+1) fit on a device.
    """
    best = max(-(-sum(size > WHOLE // (fit + 1) for size in sizes) // fit) for fit in range(1, 20))
    for threshold in {0, *(size for size in sizes if size <= WHOLE // 2)}:
        large = [size for size in sizes if size > WHOLE - threshold]
        medium = [size for size in sizes if WHOLE // 2 < size <= WHOLE - threshold]
        small = [size for size in sizes if threshold <= size <= WHOLE // 2]
        room = len(medium) * WHOLE - sum(medium)
        best = max(best, len(large) + len(medium) + max(0, -(-(sum(small) - room) // WHOLE)))
    return best


def test_shares_are_packed_tightly() -> None:
    """The limit is 1.25 times the lower bound, or one device more than the bound if that is larger."""
    results = [(devices_used(shares), lower_bound(shares)) for shares in map(random_shares, range(500))]
    assert [pair for pair in results if pair[0] > max(1.25 * pair[1], pair[1] + 1)] == []
    assert sum(taken for taken, _ in results) <= 1.1 * sum(bound for _, bound in results)


@pytest.mark.parametrize("seed", range(50))
def test_leases_never_exceed_a_device(seed: int) -> None:
    """The requests are for whole devices, shares and sets."""
    draw = random.Random(seed)
    devices = ("a", "b", "c", "d")
    broker = Broker(devices, 0, None, lambda lease: None)
    leases: list[Lease] = []
    asked = granted = 0

    def take(lease: Lease) -> None:
        nonlocal granted
        granted += 1
        leases.append(lease)

    for _ in range(200):
        if leases and draw.random() < 0.5:
            broker.release(leases.pop(draw.randrange(len(leases))).id)
        else:
            share = int(WHOLE * draw.choice(SHARES))
            sets = draw.choice([1, 1, 2]) if share <= WHOLE // 2 else 1
            count = sets * draw.randint(1, 2)
            whole = draw.random() < 0.3
            parts = [] if whole else [share] * len(devices)
            submit(broker, devices, count, take, parts=parts, sets=1 if whole else sets)
            asked += 1
        assert max(used_parts(leases).values(), default=0) <= WHOLE
    while leases:
        broker.release(leases.pop().id)
    broker.close()
    assert granted == asked
