"""The record that a rank writes on `FLIGHT_SIGNAL`: its collectives, what it has issued, and what it waits for.

It is a file, in JSON: a rank that hangs or dies may leave any bytes there, which `marshal` must not read.
"""

from __future__ import annotations

from json import dumps, loads
from typing import Literal

from msgspec import MsgspecError, Struct, field, to_builtins

from pytest_accel.messages.rank_messages import Channel, GroupUse
from pytest_accel.messages.struct_messages import from_builtins


class Collective(Struct, frozen=True):
    """A collective that a rank has entered in a process group."""

    group: str
    """The group's name, or `DEFAULT_GROUP`."""
    number: int
    """The sequence number of the collective in its group, from 1."""
    operation: str
    """For example ``all_reduce``."""
    types: tuple[str, ...]
    """The types of the input tensors, for example ``float32``."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the input tensors."""
    done: bool

    @property
    def tensors(self) -> str:
        """The types and shapes of the input tensors, such as ``float32[1024]``, separated by commas."""
        each = zip(self.types, self.shapes, strict=False)
        return ", ".join(f"{kind}[{', '.join(map(str, shape))}]" for kind, shape in each)

    @property
    def name(self) -> str:
        """The operation and its number, such as ``all_reduce #4``."""
        return f"{self.operation} #{self.number}"

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.tensors})' if self.tensors else ''}"


class RankWait(Struct, frozen=True):
    """An operation for which a rank's main thread waits without a limit, and what must be issued for it to end.

    Each of `peers` must have issued `number` operations of this kind, or in `channels`; for ``receive``, all together.
    """

    kind: Literal["collective", "receive", "send", "exchange"]
    """``exchange`` is a call of a `Gathering`, such as the fixture `gather`."""
    group: str
    """Name of the process group, or of the `Gathering`."""
    number: int
    """The number of the operation, from 1: among the messages from one rank to another, or else in the group."""
    peers: tuple[int, ...]
    channels: tuple[Channel, ...] = ()
    """The channels of a peer in which a message ends the wait."""
    tag: int = 0


class FlightRecord(Struct, frozen=True):
    """The state of one rank."""

    collectives: dict[str, dict[int, Collective]] = field(default_factory=dict)
    """The last collectives of the rank, by group and number."""
    uses: dict[str, GroupUse] = field(default_factory=dict)
    """The operations of the rank in each of its groups, by the group's name."""
    exchanges: dict[str, int] = field(default_factory=dict)
    """Numbers of calls of each `Gathering` in the test."""
    wait: RankWait | None = None
    quiet: float = 0.0
    """Seconds for which the rank issues nothing unless another rank acts; 0 if that is unknown."""
    place: str = ""
    """The place of the main thread in the code."""
    finished: bool = False
    """True if the rank has finished its test."""
    unrecorded_by: str = ""
    """The version of torch if it is too old to record collectives."""


def to_json(record: FlightRecord) -> bytes:
    """Return the content of the file with `record`."""
    return dumps(to_builtins(record, str_keys=True)).encode()


def from_json(data: bytes) -> FlightRecord:
    """Return the record in a file's content `data`, or an empty record if `data` is not valid."""
    try:
        record: FlightRecord = from_builtins(loads(data), FlightRecord)
    except (ValueError, RecursionError, MsgspecError):
        return FlightRecord()
    return record
