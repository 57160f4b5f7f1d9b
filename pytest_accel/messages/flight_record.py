"""The record that a rank writes on `FLIGHT_SIGNAL`: its collectives, what it has issued, and what it waits for."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

COLLECTIVES = "collectives"
"""The counter of the collectives of a group."""


class RankWait(Struct, frozen=True):
    """An operation for which a rank's main thread waits without a limit, and what must be issued for it to end.

    Each of `peers` must have issued `number` operations of the kinds in `counters`; for ``receive``, all together.
    """

    kind: Literal["collective", "receive", "send", "exchange"]
    """``exchange`` is a call of a `Gathering`, such as the fixture `gather`; its counter has its name."""
    group: str
    """Name of the process group; empty for an exchange, which needs none."""
    number: int
    """The number of the operation, from 1: among the messages from one rank to another, or else in the group."""
    peers: tuple[int, ...]
    counters: tuple[str, ...]
    tag: int = 0


class FlightRecord(Struct, frozen=True):
    """The state of one rank."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """torch's record of collectives."""
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of each group of the rank, by the group's name; all ranks by ""."""
    issued: dict[str, dict[str, int]] = field(default_factory=dict)
    """Numbers of operations that the rank has issued in each group, by counter; exchanges have the group ""."""
    wait: RankWait | None = None
    quiet: float = 0.0
    """Seconds for which the rank issues nothing unless another rank acts; 0 if that is unknown."""
    place: str = ""
    """The place of the main thread in the code."""
    finished: bool = False
    """True if the rank has finished its test."""
    unrecorded_by: str = ""
    """The version of torch if it is too old to record collectives."""
