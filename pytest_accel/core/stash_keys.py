"""Keys of the objects that the plugin stores in pytest's stashes, and functions that tell what a process is.

The keys are typed `Any`, because this package must not import the classes of the packages above it. A reader annotates
the value.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.world_key import DriverLeases

SESSION: pytest.StashKey[Any] = pytest.StashKey()
"""The `AccelSession`, on the config of a driver or controller."""
OWNERS: pytest.StashKey[Any] = pytest.StashKey()
"""The `MarkOwners`, on the config of each process from its `pytest_configure` on."""
LAUNCHED: pytest.StashKey[Any] = pytest.StashKey()
"""The `LaunchedSession`, on the config of a driver that a launcher has started together with other processes."""
MARKED: pytest.StashKey[Any] = pytest.StashKey()
"""The `MarkedItem`, on an item that runs in a world."""
VARIANT: pytest.StashKey[Any] = pytest.StashKey()
"""On an item that was made of a test with lists in its mark: the chosen entries by argument, and the name by which the
command line selects the item. None on that test itself."""
DRIVER_LEASES: pytest.StashKey[DriverLeases] = pytest.StashKey()
"""The `DriverLeases`, on an item that leases named resources."""
EARLY_SERVER: pytest.StashKey[Any] = pytest.StashKey()
"""The `EarlyServer`, on the config of a controller that has started its fork server before the conftests."""
RECORDERS: pytest.StashKey[Any] = pytest.StashKey()
"""The receivers of the session's events, a tuple, on the config of a controller that has any."""
RANK_PLUGIN = "accel-rank"
"""Name of the plugin that only sessions of ranks have, from their start."""
SKIPPED_FILES = "accel_skipped_files"
"""Key of `AccelSession.skipped_files` in the ``workeroutput`` of an xdist worker."""
CAUSE = "accel_cause"
"""Name of the property of a report with the cause of a failure in ranks (`verdict.causes`)."""
NOT_RUN = "accel_not_run"
"""Name of the attribute of an exception that is no failure of the test itself: xfail does not cover it."""
LAUNCHED_RANKS = "accel_launched_ranks"
"""Name of the property of a report with the number of ranks that a call of the fixture `launch` has started."""
NOT_TORN_DOWN = "accel_not_torn_down"
"""Name of the property of a report with fixtures that were not torn down, and the ranks that had ended."""
REPLACED = "accel_replaced"
"""Name of the property of a report with the reason why new ranks were started after its test."""
RUN_OF_RANK = "PYTEST_ACCEL_TESTRUNUID"
"""The variable by which a process that a test has started in a rank differs from an xdist worker."""


def is_rank(config: pytest.Config) -> bool:
    """Return True in a rank, from the start of its session; False in the main process and in an xdist worker."""
    return bool(config.pluginmanager.has_plugin(RANK_PLUGIN))


def is_xdist_worker() -> bool:
    """Return whether this process is an xdist worker, by its environment, before there is a `pytest.Config`.

    A pytest session that a test has started in a rank inherits the rank's variables, and is no worker.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    return "PYTEST_XDIST_WORKER" in os.environ and (run is None or run != os.environ.get(RUN_OF_RANK))
