"""The diagnosis of live ranks after a test has failed: their stacks, and the collectives in which they wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pytest_accel.diagnostics.collectives import Record, collectives_in, lacking, read_record
from pytest_accel.diagnostics.inspector import MachineInspector, WorldInspector
from pytest_accel.messages.flight_record import FlightRecord, RankWait
from pytest_accel.messages.rank_messages import RankExit


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of a diagnosis, shown in addition to the ranks' own reports; the mappings are by rank."""

    records: Mapping[int, Record] = field(default_factory=dict)
    """The collectives of the living ranks."""
    waits: Mapping[int, tuple[RankWait, Mapping[int, int]]] = field(default_factory=dict)
    """The message or exchange that a rank waits for, and the number of its kind that each lacking rank has issued."""
    unrecorded_by: str = ""
    """The version of torch if it is too old to record collectives; else empty."""


NOTHING = Findings()


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A world that ran a test when the session was interrupted."""

    test: str
    """The test's id; empty if unknown."""
    ends: Mapping[int, RankExit]
    """The exits of ranks that had ended."""
    stacks: Mapping[int, str]
    """The stacks of the other ranks."""
    findings: Findings


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


class Examiner(WorldInspector):
    """Examines the ranks of one world."""

    def stacks(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Return the Python stacks of the processes `pids`, by rank; see `python_stacks.take_stacks`."""
        return self.ask(MachineInspector.stacks, pids)

    def hung(self, alive: Mapping[int, int], hung: Mapping[int, int]) -> tuple[dict[int, str], Findings]:
        """Return the stacks of the `hung` ranks, and the findings on them.

        `alive` must include ranks that do not hang: these may not have reached a collective.
        """
        stacks = self.stacks(hung)
        records = self.records(alive)
        waits = {
            rank: (one.wait, lacking(rank, records))
            for rank, one in records.items()
            if one.wait is not None and one.wait.kind != "collective"
        }
        old = next((one.unrecorded_by for one in records.values() if one.unrecorded_by), "")
        return stacks, Findings(collectives(records), waits, unrecorded_by=old)

    def records(self, alive: Mapping[int, int]) -> dict[int, FlightRecord]:
        """Return the records of the `alive` ranks that have written one, without disturbing them."""
        taken = self.ask(MachineInspector.records, alive) if self._spec.grouped else {}
        return {rank: read_record(data) for rank, data in sorted(taken.items())}


def collectives(records: Mapping[int, FlightRecord]) -> dict[int, Record]:
    """Return the collectives in the records of ranks."""
    return {rank: collectives_in(record) for rank, record in records.items()}
