"""Tests of failure: ranks that die, hang or fail on purpose, and are expected to.

It gives the fixture `faults`, and the option ``--accel-jitter``. A test announces on every rank how which rank will
end. The rank that ends so counts as passed, and the other ranks are judged as always. Faults can be injected before a
collective, and random delays before all.

It tells the driver by `RankContext.announce`. The kernel knows announcements as data (`rank_messages.Announced`),
and judges the ends (`verdict/expected_ends.py`) and the faults that have not come without this feature.

- `announcements` has the methods of the fixture. The ranks exchange each announcement through the world's store.
- `injection` sees collectives at torch's dispatcher.

Tests: ``tests/features/faults``, and ``tests/verdict/test_expected_ends.py``. Page: ``docs/how-to/test-failures.md``.
"""
