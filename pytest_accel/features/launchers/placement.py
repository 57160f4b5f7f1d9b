"""The placement of a world's ranks on the machines of a session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankMachine:
    """One machine of a session."""

    name: str
    """The name for messages to the user."""
    address: str
    """The address at which other machines reach it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The machines of the processes that a launcher has started, the driver's first."""

    names: tuple[str, ...]
    """The names of the machines."""
    ranks: int
    """The maximum number of ranks of a world on each machine."""

    @property
    def capacity(self) -> int:
        """The maximum number of ranks of a world."""
        return self.ranks * len(self.names)

    def shortage(self, ranks: int, machines: int, launcher: str | None) -> str | None:
        """Return why no world of `ranks` ranks on at least `machines` machines is possible; None if it is.

        `launcher` is the launcher that has started the processes.
        """
        if ranks > self.capacity:
            return f"needs {ranks} ranks; {launcher} has started {self.capacity}"
        if machines > len(self.names):
            return f"needs {machines} machines; {launcher} has started ranks on {len(self.names)}"
        return None

    def machines_of(self, ranks: int, machines: int) -> list[int]:
        """Return the machine of each rank of a world for which there is no `shortage`.

        The world is on as few machines as possible, but at least `machines`, beginning with the driver's. Ranks are
        distributed evenly over the machines, and the ranks of one machine have consecutive numbers.
        """
        count = max(machines, -(-ranks // self.ranks))
        each, rest = divmod(ranks, count)
        return [machine for machine in range(count) for _ in range(each + (machine < rest))]
