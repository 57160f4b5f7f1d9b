"""The clocks, which tests cannot stop or set.

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
