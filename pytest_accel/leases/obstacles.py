"""The reasons why a request waits for a lease, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import localtime, strftime

from pytest_accel.leases.holder import Holder


@dataclass(frozen=True, slots=True)
class Obstacles:
    """The reasons why a request is not granted yet."""

    holders: Mapping[str, Holder]
    """The holders, in this or another session, of the candidates that are held."""
    slot_users: Sequence[tuple[int, Holder]]
    """The number of CPU slots and the holder of each lease that has any; empty if the request needs none."""
    slots: int
    """The number of CPU slots of the session."""
    ahead: Sequence[Holder]
    """The holders of earlier requests of this session that wait for the same devices or slots."""

    def lines(self, refused: Mapping[str, str]) -> list[str]:
        """Return a line for each obstacle; `refused` has the other devices that are not leased now, with the reason."""
        by_holder: dict[Holder, list[str]] = {}
        for name, holder in self.holders.items():
            by_holder.setdefault(holder, []).append(name)
        return [
            *(f"{count} of {self.slots} {_held(count)} by {_holder(holder)}" for count, holder in self.slot_users),
            *(f"{', '.join(names)} {_held(len(names))} by {_holder(holder)}" for holder, names in by_holder.items()),
            *(f"{name} {why}" for name, why in refused.items()),
            *(f"{_holder(holder)} has waited longer" for holder in self.ahead),
        ]


def _held(count: int) -> str:
    return "is held" if count == 1 else "are held"


def _holder(holder: Holder) -> str:
    """Return a description of the holder: ``pid 71 (ada) for test_big.py::test_one since 10:15:00``."""
    if not holder.pid:
        return str(holder)
    moment = localtime(holder.since)
    today = moment[:3] == localtime()[:3]
    return f"{holder} since {strftime('%H:%M:%S' if today else '%Y-%m-%d %H:%M:%S', moment)}"
