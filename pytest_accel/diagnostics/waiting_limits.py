"""Time limits for ranks: of a phase, of a test, and of ranks that wait for another rank that has failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pytest_accel.core.clock import AFTER_DEATH, GRACE, monotonic
from pytest_accel.diagnostics.rank_state import PHASES, Grace, Hang, HangCause, RankOutcome, RankState
from pytest_accel.messages.rank_messages import When


class PhaseLimit(NamedTuple):
    """The time that a phase of a test may take."""

    timeout: float
    """The timeout in seconds, of the phase or of the whole test, that ends the phase first."""
    rest: float
    """Seconds that the phase may take."""
    since: float
    """Time (`clock.monotonic`) from which `rest` counts if the phase began earlier.

    Meanwhile hooks ran in the driver, and a rank with a large report may have waited for the driver to read it.
    """

    def deadline(self, began: float) -> float:
        """Return the end of the limit of a phase that began at `began`."""
        return max(began, self.since) + self.rest


class TimeLimits:
    """The timeout of each phase of a test, and of all its phases together."""

    __slots__ = ("_phase", "_test")

    def __init__(self, phase: float) -> None:
        """Each phase may take `phase` seconds."""
        self._phase = phase
        self._test: tuple[float, float] | None = None
        """Seconds of all phases together, and the time from which they count (`clock.monotonic`)."""

    def limit_test(self, seconds: float | None) -> None:
        """Limit all phases together to `seconds` from now on; remove this limit if None."""
        self._test = None if seconds is None else (seconds, monotonic())

    def leave_out(self, since: float) -> None:
        """Leave the time since `since` out of the limit of all phases: the test waited for a world."""
        if self._test is not None:
            seconds, began = self._test
            self._test = seconds, began + monotonic() - since

    def of_phase(self) -> PhaseLimit:
        """Return the limit of a phase for which the driver begins to wait now."""
        now = monotonic()
        if self._test is not None:
            seconds, began = self._test
            deadline = began + seconds
            if deadline - now < self._phase:
                return PhaseLimit(seconds, max(0.0, deadline - now), now)
        return PhaseLimit(self._phase, self._phase, now)


def beginning(when: When, ranks: Sequence[RankState], began: float) -> float:
    """Return the time at which the last of `ranks` started phase `when`, which no rank started before `began`."""
    before = PHASES[: PHASES.index(when)]
    return max([began, *(rank.reports[phase].at for rank in ranks for phase in before if phase in rank.reports)])


def grace(ranks: Sequence[RankState], resumed: float, computing: Callable[[], bool]) -> Grace | None:
    """Return the grace of the ranks that may wait in vain for a rank that has ended or failed; None if none has.

    No grace time begins before `resumed`, when the last debugger ended. `computing` returns True if a live rank is
    computing; it is called only after a death or a failure.
    """
    deaths = [rank.end for rank in ranks if rank.end is not None]
    events = deaths + _failures(ranks, computing)
    if not events:
        return None
    first = min(events, key=_time)
    graces = [(max(first.at, resumed) + GRACE, Hang(HangCause.OTHER_RANK, GRACE, event=first))]
    if deaths and not computing():
        first = min(deaths, key=_time)
        graces.append((max(first.at, resumed) + AFTER_DEATH, Hang(HangCause.OTHER_RANK, AFTER_DEATH, event=first)))
    return min(graces)


def _time(outcome: RankOutcome) -> float:
    return outcome.at


def _failures(ranks: Sequence[RankState], computing: Callable[[], bool]) -> list[RankOutcome]:
    """Return the outcome of each phase that did not pass and whose rank another rank may wait for in vain."""
    wrong = [
        (PHASES.index(when), RankOutcome(rank.rank, report.report["outcome"], report.at))
        for rank in ranks
        for when, report in rank.reports.items()
        if report.report["outcome"] != "passed"
    ]
    if not wrong:
        return []
    open_phases = {next((phase for phase in PHASES if not rank.settled(phase)), None) for rank in ranks}
    # A rank may wait for a rank that failed or skipped in the same phase, or earlier.
    latest = max((PHASES.index(one) for one in open_phases if one not in (None, "teardown")), default=-1)
    failures = [event for phase, event in wrong if phase <= latest]
    # A rank in its teardown may wait for a rank that has failed and finished the test. While a live rank is computing,
    # the teardown has only the ordinary timeout.
    if "teardown" in open_phases and not failures:
        gone = [
            RankOutcome(rank.rank, "failed", rank.reports["teardown"].at)
            for rank in ranks
            if rank.finished is not None
            and "teardown" in rank.reports
            and any(report.report["outcome"] == "failed" for report in rank.reports.values())
        ]
        if gone and not computing():
            failures.append(min(gone, key=_time))
    return failures
