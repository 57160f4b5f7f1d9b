"""Orders of xdist's controller about the tests that it has sent to a worker. All can be pickled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HoldTest:
    """Skip the test with the number `index` in the collection until :class:`RunHeldTest`."""

    index: int


@dataclass(frozen=True, slots=True)
class RunHeldTest:
    """Run the test with the number `index`, which was on hold."""

    index: int
