"""The condition of a world after a test: reusable, to be retired, or to be killed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WorldCondition:
    """The condition of one world, as far as its driver knows. Owned by the driver's `World`.

    A world that was ruled out for another test is never allowed again.
    """

    kill_reason: str | None = None
    """Why the ranks must be killed; None if they need not be. The first reason is kept."""
    retire: bool = False
    """True if the ranks must not run another test, but can shut down cleanly."""

    @property
    def reusable(self) -> bool:
        """True if nothing is known that keeps the world from running another test."""
        return self.kill_reason is None and not self.retire

    def rule_out(self, kill_reason: str | None = None, *, retire: bool = False) -> None:
        """Have the world killed for `kill_reason`, or shut down cleanly if `retire` is set; neither: change nothing."""
        self.kill_reason = self.kill_reason or kill_reason
        self.retire = self.retire or retire
