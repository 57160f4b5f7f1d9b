"""The placement of a world's ranks: on the nodes of a session, by pure functions, or by a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pytest_accel.core.world_key import WorldKey


@dataclass(frozen=True, slots=True)
class ForkServer:
    """A fork server of a session."""

    number: int
    capacity: int | None
    """The maximum number of ranks of one world that it forks; None: any number."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node (machine) of a session."""

    name: str
    """The name for messages to the user."""
    address: str
    """The address at which other nodes reach it."""
    servers: tuple[ForkServer, ...]

    @property
    def capacity(self) -> float:
        """The maximum number of ranks of one world on this node; infinite if a server forks any number."""
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
    """The number of the node on which a rank runs, and of the fork server from which it is forked."""

    node: int
    server: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes of a session at one time, the driver's first."""

    nodes: tuple[Node, ...]

    @property
    def capacity(self) -> float:
        """The maximum number of ranks of a world; infinite if a fork server forks any number."""
        return sum(node.capacity for node in self.nodes)

    def shortage(self, ranks: int, nodes: int, launcher: str | None) -> str | None:
        """Return why no world of `ranks` ranks on at least `nodes` nodes is possible; None if it is.

        `launcher` is the launcher that has started the processes; None: there is none.
        """
        if ranks > self.capacity:
            return f"needs {ranks} ranks; {launcher} has started {self.capacity}"
        if nodes <= len(self.nodes):
            return None
        if launcher is None:
            return f"needs {nodes} nodes; a session without a launcher has 1"
        return f"needs {nodes} nodes; {launcher} has started ranks on {len(self.nodes)}"

    def seats(self, ranks: int, nodes: int) -> tuple[Seat, ...]:
        """Return the seat of each rank of a world for which there is no `shortage`.

        The world is on as few nodes as possible, but at least `nodes`. These are the first nodes, beginning with the
        driver's, or the largest ones if the same number of first nodes is too small. Ranks are distributed evenly over
        the nodes, and the ranks of one node have consecutive numbers.
        """
        chosen = self._chosen(ranks, nodes)
        taken = dict.fromkeys(chosen, 0)
        while sum(taken.values()) < ranks:
            for node in chosen:
                if taken[node] < self.nodes[node].capacity and sum(taken.values()) < ranks:
                    taken[node] += 1
        return tuple(Seat(node, server) for node in chosen for server in self.nodes[node].servers_of(taken[node]))

    def order(self, nodes: Iterable[int]) -> list[int]:
        """Return `nodes` in an order that is the same in all sessions, whichever node has the driver."""
        return sorted(nodes, key=lambda node: (self.nodes[node].name, self.nodes[node].address))

    def _chosen(self, ranks: int, nodes: int) -> list[int]:
        by_size = sorted(range(len(self.nodes)), key=lambda node: -self.nodes[node].capacity)
        for number in range(nodes, len(self.nodes) + 1):
            for order in (range(len(self.nodes)), by_size):
                chosen = sorted(order[:number])
                if sum(self.nodes[node].capacity for node in chosen) >= ranks:
                    return chosen
        raise ValueError(f"{ranks} ranks on {nodes} nodes: there is no room")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a world that a cluster has reserved."""

    request_id: int
    nodes: tuple[int, ...]
    """The node of each rank, in ascending order: the index in `Layout.nodes`, and the number of its fork server."""
    devices: Mapping[int, tuple[str, ...]]
    """By node: the values of the kind's mask variable for the reserved devices, as a process without that mask numbers
    them (``0``, ``3``, ``GPU-...``). Empty for a world without devices."""


class PlaceError(Exception):
    """A cluster cannot provide a place; the message says why."""


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
        """Request a place for a world of `key`, without the nodes `avoided`; return the id of the request.

        Call `on_place` with the place, or `on_failure` with the error if there can be none. Before that, call `on_wait`
        with the reason once it is known that the request has to wait, and again if the reason changes.
        """

    def cancel(self, request_id: int) -> None:
        """Cancel a request; no-op if it has been answered."""

    def release(self, place: Place) -> None:
        """Give a place back."""


HERE = Layout((Node("", "", (ForkServer(0, None),)),))
"""The layout of a session without a launcher."""
