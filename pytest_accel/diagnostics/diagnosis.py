"""What living ranks are at when their test has gone wrong: their stacks, and the collectives that they wait in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_accel.diagnostics.exit_status import where
from pytest_accel.diagnostics.inspector import Scout, Scouts
from pytest_accel.rank.collectives import account, place_in, read_record


@dataclass(frozen=True, slots=True)
class Findings:
    """What is told beside the ranks' own words; each by rank."""

    collectives: tuple[str, ...] = ()
    """Lines about the collectives that some rank is in, and who has not come."""
    native: Mapping[int, str] = field(default_factory=dict)
    """Native frames of ranks that do not come to an end."""
    at_death: Mapping[int, str] = field(default_factory=dict)
    """The stacks of ranks that were in the test when another one died."""


NOTHING = Findings()


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A world that ran a test when the session was interrupted."""

    test: str
    """The test's id; empty where it is not known."""
    ends: Mapping[int, str]
    """The ranks that had ended, and how."""
    stacks: Mapping[int, str]
    """The stacks of the other ranks."""
    findings: Findings


class Examiner:
    """Examines the ranks of a world."""

    def __init__(self, scouts: Scouts, *, grouped: bool) -> None:
        self._scouts = scouts
        self._grouped = grouped

    def stacks(self, pids: Mapping[int, int]) -> dict[int, str]:
        """As `take_stacks`, of the processes `pids` by rank."""
        return self._scouts.ask(Scout.stacks, pids)

    def hung(
        self, alive: Mapping[int, int], hung: Mapping[int, int], *, thoroughly: bool
    ) -> tuple[dict[int, str], Findings]:
        """The stacks of those who do not come to an end, and what else there is to find of them.

        Ranks that wait for nobody belong among the `alive`, too: it may be they who have not come. `thoroughly`: with
        native frames, which may take seconds.
        """
        stacks = self.stacks(hung)
        collectives: list[str] = []
        if self._grouped:
            records = {rank: read_record(record) for rank, record in self._scouts.ask(Scout.records, alive).items()}
            collectives = account(records, {rank: where(stack) for rank, stack in stacks.items()})
        return stacks, Findings(tuple(collectives), self._scouts.ask(Scout.native, hung) if thoroughly else {})

    def progress(self, alive: Mapping[int, int]) -> tuple[dict[int, str], list[str]]:
        """Return where the ranks of a running test are, and lines about their collectives, without disturbing them.

        A signal for their stacks would end a native call early, such as ``sleep(3)``; the one for records does not.
        """
        records = self._scouts.ask(Scout.records, alive) if self._grouped else {}
        places = {rank: place for rank, record in sorted(records.items()) if (place := place_in(record))}
        return places, account({rank: read_record(record) for rank, record in records.items()}, {})

    def at_death(self, alive: Mapping[int, int]) -> Findings:
        """What the ranks that are `alive` are at, without those of whom only a library's frames are seen."""
        return Findings(at_death={rank: stack for rank, stack in self.stacks(alive).items() if where(stack)})
