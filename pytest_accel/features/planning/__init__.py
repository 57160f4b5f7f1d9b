"""The choice of the tests of a session, and forecasts for a whole pipeline, made without running it.

It gives the choice of tests (``--accel-select``, ``--accel-shard``, ``-m`` with the arguments of marks), the plan of a
session or a pipeline (``--accel-plan``), and the advice (``--accel-advise``: which marks ask for too much).

It uses the moments `start`, `configure`, `collected` and `select`, and pytest's hooks. It stands on `order`: forecasts
are made by the real scheduler, with the times that it has stored.

- Choice: `selection`; `shards` divides a suite (pure).
- Plan: `plan_command`, `plan_text`; `forecast` and `simulation` (pure).
- Advice: `advice`.

Tests: ``tests/features/planning``. Page: ``docs/how-to/ci/plan.md``.
"""
