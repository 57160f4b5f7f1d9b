"""Plugin of inner sessions: the timeout of a test ends once only the ranks go on that wait forever (`inner.hang_here`).

With a timeout of a few seconds, the verdict would depend on ranks that come to their places in this time.
"""

from __future__ import annotations

from pytest_accel.diagnostics.waiting_limits import PhaseLimit
from pytest_accel.driver.link_to_rank import LinkToRank
from pytest_accel.driver.world import World
from pytest_accel.messages.rank_messages import When
from tests.inner import ranks_that_hang

_wait = World._pump_or_give_up


def _wait_unless_late(self: World, pending: list[LinkToRank], when: When, limit: PhaseLimit) -> None:
    unfinished = {rank.rank for rank in self.monitor.ranks if not rank.done}
    _wait(self, pending, when, limit._replace(rest=0.0) if unfinished == ranks_that_hang() else limit)


World._pump_or_give_up = _wait_unless_late  # type: ignore[method-assign]
