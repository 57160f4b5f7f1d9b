"""The choice of the tests of a session, and forecasts for a whole pipeline, made without running it.

It gives the choice of tests (``--accel-select``, ``--accel-shard``, ``-m`` with the arguments of marks), the plan of a
session or a pipeline (``--accel-plan``), the census with its command (``--accel-census``: which
tests ran in no job), and the advice (``--accel-advise``: which marks ask for too much).

It uses the moments `start`, `configure`, `collected` and `select`, and pytest's hooks. It stands on `order`: forecasts
are made by the real scheduler, with the times that it has stored.

- Choice: `selection`; `shards` divides a suite (pure).
- Plan: `plan_command`, `plan_text`; `forecast` and `simulation` (pure).
- Census: `census_hooks` records, `census_file` is the file, `census_merge` compares files (pure).
- Advice: `advice`.

Tests: ``tests/features/planning``. Pages: ``docs/how-to/ci/plan.md``, ``docs/how-to/ci/matrix.md``.
"""
