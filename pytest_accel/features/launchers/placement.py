"""The placement of a world's ranks: on the machines of a session. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ForkServer:
    """A fork server of a session."""

    number: int
    capacity: int | None
    """The maximum number of ranks of one world that it forks; None: any number."""


@dataclass(frozen=True, slots=True)
class RankMachine:
    """One machine of a session, and its fork servers."""

    name: str
    """The name for messages to the user."""
    address: str
    """The address at which other machines reach it."""
    servers: tuple[ForkServer, ...]

    @property
    def capacity(self) -> float:
        """The maximum number of ranks of one world on this machine; infinite if a server forks any number."""
        return sum(math.inf if server.capacity is None else server.capacity for server in self.servers)

    @property
    def server_numbers(self) -> tuple[int, ...]:
        """The numbers of the fork servers."""
        return tuple(server.number for server in self.servers)

    def servers_of(self, ranks: int) -> list[int]:
        """Return the number of the server of each of `ranks` ranks: the first servers, each up to its capacity."""
        found: list[int] = []
        for server in self.servers:
            left = ranks - len(found)
            found += [server.number] * (left if server.capacity is None else min(left, server.capacity))
        return found


class Seat(NamedTuple):
    """The number of the machine on which a rank runs, and of the fork server from which it is forked."""

    machine: int
    server: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The machines of a session at one time, the driver's first."""

    machines: tuple[RankMachine, ...]

    @property
    def capacity(self) -> float:
        """The maximum number of ranks of a world; infinite if a fork server forks any number."""
        return sum(machine.capacity for machine in self.machines)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the machines."""
        return tuple(machine.name for machine in self.machines)

    @property
    def servers_here(self) -> tuple[int, ...]:
        """The numbers of the fork servers of the driver's machine."""
        return self.machines[0].server_numbers

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

        The world is on as few machines as possible, but at least `machines`. These are the first ones, beginning with
        the driver's, or the largest ones if the same number of first ones is too small. Ranks are distributed evenly
        over the machines, and the ranks of one machine have consecutive numbers.
        """
        chosen = self._chosen(ranks, machines)
        taken = dict.fromkeys(chosen, 0)
        while sum(taken.values()) < ranks:
            for machine in chosen:
                if taken[machine] < self.machines[machine].capacity and sum(taken.values()) < ranks:
                    taken[machine] += 1
        return tuple(
            Seat(machine, server) for machine in chosen for server in self.machines[machine].servers_of(taken[machine])
        )

    def order(self, machines: Iterable[int]) -> list[int]:
        """Return `machines` in an order that is the same in all sessions, whichever machine has the driver."""
        return sorted(machines, key=lambda machine: (self.machines[machine].name, self.machines[machine].address))

    def _chosen(self, ranks: int, machines: int) -> list[int]:
        by_size = sorted(range(len(self.machines)), key=lambda machine: -self.machines[machine].capacity)
        for number in range(machines, len(self.machines) + 1):
            for order in (range(len(self.machines)), by_size):
                chosen = sorted(order[:number])
                if sum(self.machines[machine].capacity for machine in chosen) >= ranks:
                    return chosen
        raise ValueError(f"{ranks} ranks on {machines} machines: there is no room")
