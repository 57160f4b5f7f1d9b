"""What is known of one rank in one test, and what that makes of each phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pytest_accel.core.messages import Finished, PhaseReport, When

PHASES: tuple[When, ...] = ("setup", "call", "teardown")

Ending = Literal["passed", "failed", "skipped", "died", "hung", "unstarted"]


class RankOutcome(NamedTuple):
    """How one phase of a test ended on one rank. Made in each phase: a dataclass costs three times that."""

    rank: int
    ending: Ending
    at: float = 0.0
    report: PhaseReport | None = None
    text: str = ""
    """The end of a rank that did not report: how it died, or the time that it was given."""
    stack: str = ""
    log: str = ""
    """The end of what it wrote outside of pytest's capture."""
    sections: tuple[tuple[str, str], ...] = ()
    """Headline and text of the output that pytest had captured in a rank that did not report."""
    secondary: bool = False
    """True if the rank was terminated because another one had failed or ended, and not for its own timeout."""
    later: RankOutcome | None = None
    """How the rank ended in a later phase of the test; None: it did not, or that is not known yet."""


@dataclass(slots=True, eq=False, kw_only=True)
class RankState:
    """Filled in while the test runs."""

    rank: int
    reports: dict[When, PhaseReport] = field(default_factory=dict)
    finished: Finished | None = None
    early: list[object] = field(default_factory=list)
    """What it has sent of the test that it was told of ahead."""
    died_early: float | None = None
    """When it died, maybe in that test: it had finished the one before."""
    end: RankOutcome | None = None
    """Set when the rank will say nothing more, whatever the phase."""

    @property
    def done(self) -> bool:
        """Whether the test can bring nothing new from it."""
        return self.finished is not None or self.end is not None

    @property
    def has_failed(self) -> bool:
        """Whether it has reported a phase that did not pass."""
        return any(report.report["outcome"] != "passed" for report in self.reports.values())

    def begin(self) -> list[object]:
        """Another test begins; gives what the rank has sent of it already."""
        self.reports.clear()
        self.finished = None
        early, self.early = self.early, []
        return early

    def has_passed(self, serial: int, phases: int, at: float) -> bool:
        """Take it that the first so many `phases` have passed; whether that is news."""
        news = [when for when in PHASES[:phases] if when not in self.reports]
        for when in news:
            self.reports[when] = PhaseReport(serial, when, {"outcome": "passed"}, at)
        return bool(news)

    @property
    def phase(self) -> When:
        """The phase that the rank is in, as far as it is known: the first without a report."""
        return next((when for when in PHASES if when not in self.reports and not self.settled(when)), "teardown")

    def settled(self, when: When) -> bool:
        """Whether phase `when` can bring nothing new from it."""
        if self.done or (when in self.reports and when != "teardown"):
            return True
        return when == "call" and self._has_no_call

    def outcome(self, when: When) -> RankOutcome:
        """How phase `when` ended, of a rank that is done or settled."""
        if when == "teardown" and self.end is not None:
            return self.end  # Whatever it had reported: its process did not outlive the test.
        report = self.reports.get(when)
        if report is not None:
            ending: Ending = report.report["outcome"]
            return RankOutcome(self.rank, ending, report.at, report, later=self.end)
        if self.end is not None:
            return self.end
        if when == "call" and self._has_no_call:
            return RankOutcome(self.rank, "passed")  # Which is no news.
        return RankOutcome(self.rank, "unstarted", text=f"came to the end of the test without a report of its {when}")

    @property
    def _has_no_call(self) -> bool:
        setup = self.reports.get("setup")
        return setup is not None and setup.report["outcome"] != "passed"
