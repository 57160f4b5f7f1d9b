"""Tests of failure: ranks that die, hang or fail on purpose, as the test expects.

This feature gives the fixture `faults`, and the option ``--accel-jitter``. A test announces on every rank which rank
will end, and how. A rank that ends as announced counts as passed, and the other ranks are judged as always. Faults can
be injected before a collective, and random delays before all.

`RankContext.announce` sends announcements to the driver. The kernel knows them as data (`rank_messages.Announced`). It
judges the ends (`verdict/expected_ends.py`) and the faults that have not come without this feature.

`announcements` has the methods of the fixture. The ranks exchange each announcement through the world's store.

Tests: ``tests/features/faults``, and ``tests/verdict/test_expected_ends.py``. Page: ``docs/how-to/test-failures.md``.
"""
