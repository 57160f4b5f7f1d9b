"""Hooks with which a plugin or a conftest sends data from ranks to the driver.

If pytest-accel may not be installed, mark the implementation with ``@pytest.hookimpl(optionalhook=True)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def pytest_accel_rank_data(item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
    """Return data that a rank sends to the driver with the report of a test's phase, or None.

    Called in each rank for each phase that it reports, after `report` was created. The values are plain data: None,
    bool, int, float, str, bytes, and lists, tuples and dicts of these. The dicts of all implementations are merged.
    Keys that begin with ``pytest_accel:`` are reserved for pytest-accel. The test fails on a value of another type, a
    reserved key, a key that two implementations return, and an exception.

    :param item: the test item in this rank.
    :param report: the report of this rank; ``report.when`` is the phase.
    """


def pytest_accel_merge(item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]) -> None:
    """Process the data that ranks have sent for a phase.

    Called in the driver (the main process, or an xdist worker) for each phase in which a rank has sent data, before
    any other plugin sees `report`. An implementation may change `report`, for instance add a section or set it to
    failed. It may add to ``item.user_properties``, which the reports of later phases contain. If it sets `report` to
    failed or raises an exception, the test has failed, even with ``xfail``.

    :param item: the test item in the driver. Its fixtures are set up only in the ranks, not here.
    :param report: the merged report of all ranks.
    :param rank_data: the data of each rank, by rank. Ranks that sent nothing, or died, are absent. Keys that begin with
        ``pytest_accel:`` belong to pytest-accel.
    """
