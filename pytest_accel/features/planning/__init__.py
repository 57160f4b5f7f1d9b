"""The choice of the tests of a session, and the plan of a session, made without running it.

It gives the choice of tests (``--accel-select``, ``--accel-shard``, ``-m`` with the arguments of marks) and the plan
(``--accel-plan``). It stands on `order`: `plan` simulates its rule, with the times that it has stored.

Choice: `selection`. Plan: `plan`.

Tests: ``tests/features/planning``. Page: ``docs/how-to/ci/plan.md``.
"""
