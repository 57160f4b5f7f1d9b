"""Marks without one number: lists of world sizes and backends, and "all", as many devices or ranks as there are.

A list makes a test of each entry: a copy of pytest's item with an id of its own, and with the chosen entries in its
stash (`VARIANT`). Pytest's own parametrization knows functions only, and no mark of a parameter or a hook. Ranks
collect the test as it is, and run it by the name that the driver sends. "all" becomes a number in each plan of a test,
since ``--accel-plan`` also plans for other machines.

The kernel checks the arguments (`core/marks.py`), and plans with the
chosen entries (`driver/item_plan.py`).

Tests: ``tests/features/sizes``. Page: ``docs/reference/marks.md``.
"""
