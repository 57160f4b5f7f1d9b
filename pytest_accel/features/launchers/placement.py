"""The placement of a world's ranks on the machines of a session. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RankMachine:
    """One machine of a session, and its fork servers."""

    name: str
    """The name for messages to the user."""
    address: str
    """The address at which other machines reach it."""
    servers: tuple[int, ...]
    """The numbers of its fork servers. Under a launcher, each forks at most one rank of a world."""


class Seat(NamedTuple):
    """The number of the machine on which a rank runs, and of the fork server from which it is forked."""

    machine: int
    server: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The machines of a session at one time, the driver's first."""

    machines: tuple[RankMachine, ...]

    @property
    def capacity(self) -> int:
        """The maximum number of ranks of a world."""
        return sum(len(machine.servers) for machine in self.machines)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the machines."""
        return tuple(machine.name for machine in self.machines)

    def shortage(self, ranks: int, machines: int, launcher: str | None) -> str | None:
        """Return why no world of `ranks` ranks on at least `machines` machines is possible; None if it is.

        `launcher` is the launcher that has started the processes.
        """
        if ranks > self.capacity:
            return f"needs {ranks} ranks; {launcher} has started {self.capacity}"
        if machines > len(self.machines):
            return f"needs {machines} machines; {launcher} has started ranks on {len(self.machines)}"
        return None

    def machines_of(self, ranks: int, machines: int) -> list[int]:
        """Return the machine of each rank of a world for which there is no `shortage`."""
        return [seat.machine for seat in self.seats(ranks, machines)]

    def seats(self, ranks: int, machines: int) -> tuple[Seat, ...]:
        """Return the seat of each rank of a world for which there is no `shortage`.

        The world is on as few machines as possible, but at least `machines`. These are the first machines, beginning
        with the driver's, or the largest machines if as many first machines are too small. Ranks are distributed evenly
        over the machines, and the ranks of one machine have consecutive numbers.
        """
        chosen = self._chosen(ranks, machines)
        taken = dict.fromkeys(chosen, 0)
        while sum(taken.values()) < ranks:
            for machine in chosen:
                if taken[machine] < len(self.machines[machine].servers) and sum(taken.values()) < ranks:
                    taken[machine] += 1
        return tuple(Seat(one, server) for one in chosen for server in self.machines[one].servers[: taken[one]])

    def order(self, machines: Iterable[int]) -> list[int]:
        """Return `machines` in an order that is the same in all sessions, whichever machine has the driver."""
        return sorted(machines, key=lambda machine: (self.machines[machine].name, self.machines[machine].address))

    def _chosen(self, ranks: int, machines: int) -> list[int]:
        by_size = sorted(range(len(self.machines)), key=lambda machine: -len(self.machines[machine].servers))
        for number in range(machines, len(self.machines) + 1):
            for order in (range(len(self.machines)), by_size):
                chosen = sorted(order[:number])
                if sum(len(self.machines[machine].servers) for machine in chosen) >= ranks:
                    return chosen
        raise ValueError(f"{ranks} ranks on {machines} machines: there is no room")
