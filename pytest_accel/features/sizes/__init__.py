"""Marks with lists of world sizes and backends, and with "all", for as many devices or ranks as there are.

Each entry of a list becomes a test: a copy of pytest's item with an id of its own, and with the chosen entries in its
stash (`VARIANT`). Pytest's own parametrization knows functions only, and no mark of a parameter or a hook. Ranks
collect the test as it is, and run it by the name that the driver sends. "all" becomes a number in each plan of a test,
since ``--accel-plan`` also plans for other machines.

The kernel checks the arguments (`core/marks.py`), and plans with the chosen entries (`driver/item_plan.py`).

Tests: ``tests/features/sizes``. Page: ``docs/reference/marks.md``.
"""
