"""Tests of the policy with shared devices: few devices are used, and no device is granted beyond its capacity."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Lease, Request, decide

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


def take(lease: Lease, free: dict[str, int]) -> None:
    for device, parts in lease.takes():
        free[device] -= parts


def devices_used(shares: Sequence[int]) -> int:
    """Return the number of devices that are used for `shares`, which are requested one after the other."""
    free = {f"d{number}": WHOLE for number in range(len(shares))}
    leases: list[Lease] = []
    for number, share in enumerate(shares):
        (lease,) = decide([Request(number, tuple(free), 1, parts=(share,) * len(free))], free, 0)
        take(lease, free)
        leases.append(lease)
    total = used_parts(leases)
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
    free = dict.fromkeys("abcd", WHOLE)
    waiting: list[Request] = []
    leases: list[Lease] = []
    granted = 0
    for number in range(200):
        if leases and draw.random() < 0.5:
            for device, parts in leases.pop(draw.randrange(len(leases))).takes():
                free[device] += parts
        else:
            share = int(WHOLE * draw.choice(SHARES))
            sets = draw.choice([1, 1, 2]) if share <= WHOLE // 2 else 1
            count = sets * draw.randint(1, 2)
            whole = draw.random() < 0.3
            parts_of_each = () if whole else (share,) * len(free)
            waiting.append(Request(number, tuple(free), count, parts=parts_of_each, sets=1 if whole else sets))
        for lease in decide(waiting, free, 0):
            take(lease, free)
            waiting = [request for request in waiting if request.id != lease.id]
            leases.append(lease)
            granted += 1
        assert min(free.values()) >= 0
        assert max(used_parts(leases).values(), default=0) <= WHOLE
    assert granted
