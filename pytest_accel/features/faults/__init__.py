"""Tests of failure: ranks that die, hang or fail on purpose, and are expected to.

It gives the fixture `faults`. A test announces on every rank how which rank will end. The rank that ends so counts as
passed, and the other ranks are judged as always.

It uses the moment `make_faults`, and `RankContext.expect_ends` to tell the driver. The kernel knows announced ends as
data (`core.rank_messages.ExpectedEnd`), and judges them (`verdict/expected_ends.py`) without this feature.

- `announcements` has the methods of the fixture. The ranks exchange each announcement through the world's store.

Tests: ``tests/features/faults``, and ``tests/verdict/test_expected_ends.py``. Page: ``docs/how-to/test-failures.md``.
"""
