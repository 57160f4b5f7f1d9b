"""Ranks without processes: ``distributed(4096, backend="fake")`` runs one process of a group of any size.

The process group is torch's fake group. Its collectives exchange nothing, so a test in such a group sees shapes,
placements and memory of sizes that no machine has, and never values. A call that needs another rank fails the test.

`hooks` fails tests that call functions which would hang, or return uninitialised memory or this rank's data in place
of other ranks' data. The kernel opens the group like any other, with a size of its own
(`core.world_key.WorldKey.fake_size`), and knows which arguments of the marks and which fixtures have no meaning in it
(`driver/item_plan.py`, `core/missing_mark.py`). The world key has the backend, so the process runs no other tests, and
the functions that are replaced in it are not restored.

Tests: ``tests/features/fake_group``. Section: "Sizes that no machine has" in ``docs/how-to/process-groups.md``.
"""
