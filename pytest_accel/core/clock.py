"""The clocks, which tests cannot stop or set, and timeouts that several modules share.

A test may change the time in a rank: freezegun replaces ``time.monotonic`` in every module that has imported it, and
time-machine replaces it in the ``time`` module itself. Neither replaces ``time.clock_gettime`` for the monotonic clock
of the kernel, which this module reads.
"""

from __future__ import annotations

import time
from functools import partial

monotonic = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
"""Return seconds since an arbitrary start, which is the same for all processes of a machine."""
wall_clock = partial(time.clock_gettime, time.CLOCK_REALTIME)
"""Return seconds since the epoch."""

GRACE = 3.0
"""Seconds that the other ranks may continue after a rank has failed, since they may wait for it forever."""
AFTER_DEATH = 0.6
"""Replaces `GRACE` if a rank has died and no other rank is at work: no result is expected from them."""
START_TIMEOUT = 120.0
"""Timeout in seconds for the fork server to fork ranks, for `mpirun` to start processes, and for a rank to import
modules, configure pytest and join its process group."""
COLLECTION_TIMEOUT = 600.0
"""Timeout in seconds for ranks to collect the file of a test, which may import a large framework from a cold disk."""
RETIRE_TIMEOUT = 10.0
"""Seconds that the ranks of a retired world have to tear down their session fixtures."""
