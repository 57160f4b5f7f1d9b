"""Orders of xdist's controller about the tests that it has sent to a worker. All can be pickled."""

from __future__ import annotations

from msgspec import Struct


class HoldTest(Struct, frozen=True):
    """Skip the test with the number `index` in the collection until :class:`RunHeldTest`."""

    index: int


class RunHeldTest(Struct, frozen=True):
    """Run the test with the number `index`, which was on hold."""

    index: int
