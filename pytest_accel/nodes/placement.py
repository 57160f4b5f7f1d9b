"""On which machines the fork servers of a session are, and from which of them a world's ranks come: pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Node:
    """A machine."""

    name: str
    """As a person knows it."""
    address: str
    """Where the others reach it."""
    servers: tuple[int, ...]
    """The numbers of the fork servers on it."""


class Seat(NamedTuple):
    """Where a rank comes from."""

    node: int
    server: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All machines of a session, the driver's first."""

    nodes: tuple[Node, ...]

    @property
    def size(self) -> int:
        """How many fork servers there are, which is how many ranks a world may have."""
        return sum(len(node.servers) for node in self.nodes)

    def shortage(self, ranks: int, nodes: int, launcher: str | None) -> str | None:
        """Why there can be no world of so many `ranks` on `nodes` machines or more; None: there can.

        `launcher` is what has started the processes; None: nothing has, and there are as many ranks as are wanted.
        """
        if launcher is not None and ranks > self.size:
            return f"needs {ranks} ranks; {launcher} has started {self.size}"
        if nodes <= len(self.nodes):
            return None
        if launcher is None:
            return f"needs {nodes} nodes; without a launcher over several there is 1"
        return f"needs {nodes} nodes; {launcher} has started ranks on {len(self.nodes)}"

    def seats(self, ranks: int, nodes: int) -> tuple[Seat, ...]:
        """The seats of a world for which there is no `shortage`, by rank.

        On as few machines as do, but `nodes` at least: the driver's first, unless larger ones make them fewer. Ranks
        are dealt out evenly, and those of one machine have consecutive numbers.
        """
        chosen = self._chosen(ranks, nodes)
        taken = dict.fromkeys(chosen, 0)
        while sum(taken.values()) < ranks:
            for node in chosen:
                if taken[node] < len(self.nodes[node].servers) and sum(taken.values()) < ranks:
                    taken[node] += 1
        return tuple(Seat(node, server) for node in chosen for server in self.nodes[node].servers[: taken[node]])

    def order(self, nodes: Iterable[int]) -> list[int]:
        """Machines in an order that is the same in all sessions, whichever of them is the driver's."""
        return sorted(nodes, key=lambda node: (self.nodes[node].name, self.nodes[node].address))

    @property
    def near(self) -> tuple[int, ...]:
        """The servers on the driver's machine."""
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
"""A session that no launcher has started."""
