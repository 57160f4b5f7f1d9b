"""The events of a session for its recorders: what happens in the pool, and the phases of tests in ranks.

The pool knows no receiver. It emits each event by a name, such as ``WorldStarting``, with fields of plain data. The
feature `record` documents the events (`features/record/record_file.py`).
"""

from __future__ import annotations

from typing import Annotated, Protocol

from msgspec import Meta, Struct

Timestamp = Annotated[float, Meta(ge=0, le=1e11)]
"""Seconds since the epoch, until the year 5138: later times are too large for some functions.

msgspec checks this when it reads an event.
"""


class CollectiveCall(Struct, frozen=True, omit_defaults=True):
    """A collective that a rank has issued, from torch's flight recorder."""

    name: str
    """The backend and the operation, such as ``gloo:all_reduce``."""
    number: int
    """The number of the collective in its process group, from 1."""
    group: str
    """Name of the process group."""
    issued: Timestamp
    stop: Timestamp = 0.0
    """Time at which it was found to have ended; 0 if unknown, as for all collectives of gloo."""


class RankPhase(Struct, frozen=True, omit_defaults=True):
    """A phase of a test in a rank."""

    rank: int
    ending: str
    """passed, failed, skipped, died, hung, stopped (after another rank had failed or ended) or unstarted."""
    start: Timestamp = 0.0
    """0 if unknown."""
    stop: Timestamp = 0.0
    """The end of the phase, or of the rank."""
    collectives: tuple[CollectiveCall, ...] = ()
    """The last collectives of the phase, of torch 2.8 or newer."""


class Recorder(Protocol):
    """The receiver of events."""

    def __call__(self, event: str, /, **fields: object) -> None:
        """Record the event with the name `event`. Never raise. Called in any thread."""


def pass_to(*receivers: Recorder) -> Recorder:
    """Return a recorder that passes each event on to all `receivers`."""

    def record(event: str, /, **fields: object) -> None:
        for receive in receivers:
            receive(event, **fields)

    return record
