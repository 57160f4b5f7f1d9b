"""Call of the kernel: Hypothesis in lock-step, around the call of a test in a rank."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pytest_accel.features.properties import hypothesis_engine
from pytest_accel.features.properties.lockstep import Lockstep

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext


def around_call(context: RankContext) -> AbstractContextManager[None] | None:
    """Return a context in which Hypothesis runs the same examples on all ranks; None if there is one rank."""
    if context.spec.ranks == 1:
        return None
    hypothesis_engine.install()
    return Lockstep(context).active()
