"""The order in which tests run, chosen so that devices are not idle while tests wait for them.

It gives the order over xdist's workers (``accel_schedule``), the order in one process (``always``), and the
times of tests that both need (pytest's cache, ``--accel-durations``, the command ``durations``).

It uses the moments `configure`, `redirected` and `collection_finished`, xdist's hook for schedulers, and a channel of
its own to each worker.

- A worker sends the needs of its tests: `worker_channels`, `test_demand`.
- The controller chooses a scheduler: `scheduler_choice`. The plugin's `scheduler` sends each worker the tests that
  `plan` (pure) starts there, out of the `backlog`.
- Times of tests: `stored_durations`.

Tests: ``tests/features/order``. Page: ``docs/how-to/xdist.md``.
"""
