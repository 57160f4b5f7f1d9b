"""Call of the kernel: the object that the fixture `faults` gives to a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_accel.features.faults.announcements import Faults

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext


def make_faults(context: RankContext) -> Faults:
    """Return the announcements of one test, of which there are none yet."""
    return Faults(context)
