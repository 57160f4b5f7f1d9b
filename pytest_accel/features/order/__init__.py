"""The order in which tests run, chosen so that devices are not idle while tests wait for them.

It gives the order over xdist's workers (``accel_schedule``), the order in one process (``always``), and the
times of tests that both need (pytest's cache, ``--accel-durations``, the command ``durations``).

A worker sends the needs of its tests (`test_demand`); the controller's `scheduler` sends each worker the tests that the
`rule` (pure) chooses, with their `stored_durations`.

Tests: ``tests/features/order``. Page: ``docs/how-to/xdist.md``.
"""
