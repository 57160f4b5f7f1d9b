"""The placement of a world's ranks on the nodes and fork servers of a session: pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Node:
    """One node (machine) of a session."""

    name: str
    """The name for messages to the user."""
    address: str
    """The address at which other nodes reach it."""
    servers: tuple[int, ...]
    """The numbers of the fork servers on it."""


class Seat(NamedTuple):
    """The place of a rank: the node it runs on, and the fork server from which it is forked."""

    node: int
    server: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All nodes of a session, the driver's first."""

    nodes: tuple[Node, ...]

    @property
    def size(self) -> int:
        """The number of fork servers, which under a launcher is the maximum number of ranks of a world."""
        return sum(len(node.servers) for node in self.nodes)

    def shortage(self, ranks: int, nodes: int, launcher: str | None) -> str | None:
        """Return why no world of `ranks` ranks on at least `nodes` nodes is possible; None if it is.

        `launcher` is the launcher that has started the processes. If None, the number of ranks is not limited.
        """
        if launcher is not None and ranks > self.size:
            return f"needs {ranks} ranks; {launcher} has started {self.size}"
        if nodes <= len(self.nodes):
            return None
        if launcher is None:
            return f"needs {nodes} nodes; without a launcher over several there is 1"
        return f"needs {nodes} nodes; {launcher} has started ranks on {len(self.nodes)}"

    def seats(self, ranks: int, nodes: int) -> tuple[Seat, ...]:
        """Return the seat of each rank of a world for which there is no `shortage`.

        The world is on as few nodes as possible, but at least `nodes`: the first nodes, beginning with the driver's,
        unless larger ones make fewer nodes suffice. Ranks are distributed evenly over the nodes, and the ranks of one
        node have consecutive numbers.
        """
        chosen = self._chosen(ranks, nodes)
        taken = dict.fromkeys(chosen, 0)
        while sum(taken.values()) < ranks:
            for node in chosen:
                if taken[node] < len(self.nodes[node].servers) and sum(taken.values()) < ranks:
                    taken[node] += 1
        return tuple(Seat(node, server) for node in chosen for server in self.nodes[node].servers[: taken[node]])

    def order(self, nodes: Iterable[int]) -> list[int]:
        """Return `nodes` in an order that is the same in all sessions, whichever node has the driver."""
        return sorted(nodes, key=lambda node: (self.nodes[node].name, self.nodes[node].address))

    @property
    def local_servers(self) -> tuple[int, ...]:
        """The numbers of the fork servers on the driver's node."""
        return self.nodes[0].servers

    def _chosen(self, ranks: int, nodes: int) -> list[int]:
        by_size = sorted(range(len(self.nodes)), key=lambda node: -len(self.nodes[node].servers))
        for number in range(nodes, len(self.nodes) + 1):
            for order in (range(len(self.nodes)), by_size):
                chosen = sorted(order[:number])
                if sum(len(self.nodes[node].servers) for node in chosen) >= ranks:
                    return chosen
        raise ValueError(f"{ranks} ranks on {nodes} machines: there is no room")


HERE = Layout((Node("", "", (0,)),))
"""The layout of a session without a launcher."""
