"""The clock by which deadlines are kept.

A test may stop time, or set it, where its deadlines are kept: freezegun replaces ``time.monotonic`` in
every module that has it, time-machine in the ``time`` module itself. Neither touches what is read here: the kernel's
clock by its number.
"""

from __future__ import annotations

import time
from functools import partial

monotonic = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
"""Seconds, of no meaning but their difference; the same for all processes of a machine."""
