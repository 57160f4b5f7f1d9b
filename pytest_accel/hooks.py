"""The hooks by which a plugin or a conftest brings data from ranks to the driver.

Mark an implementation with ``@pytest.hookimpl(optionalhook=True)`` where pytest-accel may be absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def pytest_accel_rank_data(item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
    """Return what a rank sends to the driver with the report of a test's phase; None: nothing.

    Called in each rank for each phase that it reports, when `report` has been made. The values are plain data: None,
    bool, int, float, str, bytes, and lists, tuples and dicts of these. The dicts of all implementations are put
    together. Keys that begin with ``pytest_accel:`` are reserved for pytest-accel. A value of another type, a reserved
    key, a key that is given twice and an exception fail the test.

    :param item: the test, as this rank has it.
    :param report: this rank's own report; ``report.when`` is the phase.
    """


def pytest_accel_merge(item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]) -> None:
    """Take in what ranks have sent for a phase.

    Called in the driver (the main process, or an xdist worker) for each phase in which a rank has sent something,
    before any other plugin sees `report`. An implementation may change it, for instance add a section or fail it, and
    may add to ``item.user_properties``, which the reports of later phases carry. An exception fails the test.

    :param item: the test, as the driver has it: its fixtures have been set up in the ranks alone.
    :param report: the merged report of all ranks.
    :param rank_data: what each rank has sent, by rank; a rank that sent nothing, or has died, is absent. Keys that
        begin with ``pytest_accel:`` are pytest-accel's own.
    """
