"""The driver's knowledge of one rank in one test, and the outcome of each phase that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from pytest_accel.messages.rank_messages import Announced, Collected, Finished, PhaseReport, RankExit, TornDown, When

PHASES: tuple[When, ...] = ("setup", "call", "teardown")

Ending = Literal["passed", "failed", "skipped", "died", "hung", "unstarted", "absent"]
"""``absent`` is the ending of a subtest that the rank has not reported."""


class HangCause(Enum):
    """The causes for which a rank counts as hung."""

    PHASE_TIMEOUT = "phase timeout"
    """The rank did not finish a phase within its timeout."""
    START_TIMEOUT = "start timeout"
    """The rank did not become ready for a test in time."""
    COLLECTION_TIMEOUT = "collection timeout"
    """The rank did not collect the test's file in time."""
    OTHER_RANK = "other rank"
    """Another rank had failed or ended, and the rank did not finish the test in its grace time."""
    DEADLOCK = "deadlock"
    """The rank waited for an operation that can never complete; see `diagnostics.collectives`."""


class Hang(NamedTuple):
    """Why a rank counts as hung."""

    cause: HangCause
    seconds: float
    """The timeout or grace time that the rank exceeded; 0 for `DEADLOCK`."""
    when: When | None = None
    """The phase, for `PHASE_TIMEOUT`."""
    event: RankOutcome | None = None
    """The outcome of the other rank that started the grace time, for `OTHER_RANK`.

    It is ``passed`` if ranks hang as announced after all others have finished the call.
    """


Grace = tuple[float, Hang]
"""The end of the time that ranks have after an event of another rank (`clock.monotonic`), and why they hang then."""


class RankOutcome(NamedTuple):
    """The outcome of one phase of a test on one rank.

    A named tuple, because each phase makes an instance, and a dataclass takes three times as long.
    """

    rank: int
    ending: Ending
    at: float = 0.0
    report: PhaseReport | None = None
    text: str = ""
    """The text that a rank has sent about its end in place of a report; empty if it could not."""
    stack: str = ""
    """The stacks of the threads of a rank that hung, or that died of a fatal error; see `python_stacks`."""
    sections: tuple[tuple[str, str], ...] = ()
    """Headlines and texts of the output of a rank that did not report."""
    later: RankOutcome | None = None
    """The end of the rank in a later phase of the test; None if it did not end, or that is not known yet."""
    exit: RankExit | None = None
    """The end of the process of a rank that died; None if it did not die, or its end is unknown."""
    headline: str = ""
    """For a rank that could not run the test: the cause in one line, if the rank has recognized it."""
    hang: Hang | None = None
    """Why the rank counts as hung, or None if it does not hang."""
    span: tuple[float, float] = (0.0, 0.0)
    """For a rank that ended without a report: start and end of its phase, in seconds since the epoch."""
    when: When | None = None
    """For a rank that ended without a report: its phase. The driver's may be later, if a hook has skipped the call."""
    expected: bool = False
    """True if the rank has ended as all ranks have announced; see `verdict.expected_ends`."""

    @property
    def secondary(self) -> bool:
        """True if the rank was terminated because another rank had failed or ended, and not for its own timeout."""
        return self.hang is not None and self.hang.cause is HangCause.OTHER_RANK


@dataclass(eq=False)
class RankState:
    """The state of one rank during a test; the driver's world updates it while the test runs."""

    rank: int
    reports: dict[When, PhaseReport] = field(default_factory=dict)
    finished: Finished | None = None
    collected: Collected | None = None
    """The rank's answer to the request to collect the test's file; None if there is none."""
    not_run: RankOutcome | None = None
    """Set if the test is not sent to the rank, because it or another rank cannot run it."""
    end: RankOutcome | None = None
    """Set when the rank will send nothing more, in any phase."""
    interrupted: bool = False
    """True if the rank hung in Python code, and has failed its test when it was interrupted (`INTERRUPT_SIGNAL`)."""
    announced: Announced = field(default_factory=Announced)
    """The announcements of the rank in the call of the test."""
    torn_down: TornDown | None = None
    """The rank's answer to the request to tear down all fixtures after the test; None if there is none."""

    @property
    def done(self) -> bool:
        """True if no more messages about the current test are expected from the rank."""
        return self.finished is not None or self.end is not None or self.not_run is not None

    @property
    def has_failed(self) -> bool:
        """True if the rank has reported a phase that did not pass."""
        return any(report.report["outcome"] != "passed" for report in self.reports.values())

    def begin(self) -> None:
        """Reset the state for the next test."""
        self.reports.clear()
        self.finished = self.collected = self.not_run = self.torn_down = None
        self.announced = Announced()

    def forget_reports(self, when: When) -> None:
        """Forget the reports of phase `when` and of later phases: the rank has not passed them after all."""
        for phase in PHASES[PHASES.index(when) :]:
            self.reports.pop(phase, None)

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Headlines and texts of the output that pytest has captured in the phases that the rank has passed."""
        reports = [self.reports[when].report for when in PHASES if when in self.reports]
        passed = [report.get("sections", []) for report in reports if report["outcome"] == "passed"]
        return passed[-1] if passed else []  # The report of a phase has the output of earlier phases, too.

    @property
    def phase(self) -> When:
        """The phase that the rank is in, as far as the driver knows: the first without a report."""
        return next((when for when in PHASES if when not in self.reports and not self.settled(when)), "teardown")

    def settled(self, when: When) -> bool:
        """Return True if no more messages about phase `when` are expected from the rank."""
        # `Finished` follows the report of the teardown.
        if self.done or (when in self.reports and when != "teardown"):
            return True
        return when == "call" and self._has_no_call

    def outcome(self, when: When) -> RankOutcome:
        """Return the outcome of phase `when`; the rank must be done, or the phase settled."""
        if when == "teardown" and self.end is not None:
            return self.end  # Even if there is a report: the process did not outlive the test.
        report = self.reports.get(when)
        if report is not None:
            ending: Ending = report.report["outcome"]
            return RankOutcome(self.rank, ending, report.at, report, later=self.end)
        if self.end is not None:
            return self.end
        if self.not_run is not None:
            return self.not_run
        if when == "call" and self._has_no_call:
            return RankOutcome(self.rank, "passed")  # There is no call phase after a setup that did not pass.
        return RankOutcome(self.rank, "unstarted")

    @property
    def _has_no_call(self) -> bool:
        setup = self.reports.get("setup")
        return setup is not None and setup.report["outcome"] != "passed"
