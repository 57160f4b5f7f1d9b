"""The order in which tests run, chosen so that devices are not idle while tests wait for them.

It gives the order over xdist's workers (`scheduler`), the order in one process (``accel_schedule = always``), and the
times of tests in earlier sessions (`stored_durations`, with the command ``durations``).

Tests: ``tests/features/order``. Page: ``docs/how-to/xdist.md``.
"""
