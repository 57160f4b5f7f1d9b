"""Data that is shown after the tests: the places of interrupted ranks, and errors of ranks that belong to no test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from pytest_accel.messages.flight_record import FlightRecord
from pytest_accel.messages.rank_messages import RankExit


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A world that ran a test when the session was interrupted."""

    test: str
    """The test's id; empty if unknown."""
    ends: Mapping[int, RankExit]
    """The exits of ranks that had ended."""
    stacks: Mapping[int, str]
    """The stacks of the other ranks."""
    records: Mapping[int, FlightRecord]
    """The records of the living ranks."""


class OutsideError(Enum):
    """The errors of a rank that belong to no test."""

    DIED_BETWEEN_TESTS = "died between tests"
    DIED_IN_TEARDOWN = "died in teardown"
    """The rank ended before it had torn down its session fixtures."""
    FAILED_BY_HOOK = "failed by a hook"
    """A hook has set a failing exit status of the rank's session."""
    NOT_TORN_DOWN = "not torn down"
    """The fork server ended while the ranks tore down their session fixtures."""
    NOT_ENDED = "not ended"
    """The rank did not end its session in time, and was killed."""


@dataclass(frozen=True, slots=True)
class RankProblem:
    """An error of a rank that belongs to no test."""

    error: OutsideError
    rank: int
    size: int
    """The number of ranks of its world."""
    exit: RankExit | None = None
    seconds: float = 0.0
    """The timeout, for `NOT_ENDED`."""
    stack: str = ""
    """The stacks of a rank that crashed or did not end."""
    output: str = ""
    """The last lines of the rank's log."""
