"""Hooks with which a plugin or a conftest sends data from ranks to the driver.

If pytest-accel may not be installed, mark the implementation with ``@pytest.hookimpl(optionalhook=True)``.

All hooks after these two are internal: the kernel calls its features by them, and each release may change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.marks import Marks
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.item_redirection import Redirector
    from pytest_accel.pool.starter import ClusterConnection, LocalStarter, Starter, StarterReports
    from pytest_accel.rank.context import RankContext
    from pytest_accel.session import AccelSession


def pytest_accel_rank_data(item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
    """Return data that a rank sends to the driver with the report of a test's phase, or None.

    Called in each rank for each phase that it reports, after `report` was created. The values are plain data: None,
    bool, int, float, str, bytes, and lists, tuples and dicts of these. The dicts of all implementations are merged.
    Keys that begin with ``pytest_accel:`` are reserved for pytest-accel. The test fails on a value of another type, a
    key that two implementations return, and an exception.

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


# Internal hooks, with which the kernel calls the features of this package


def pytest_accel_start(early_config: pytest.Config, args: list[str]) -> None:
    """The command line is known, and no conftest has been imported. Not called in ranks."""


def pytest_accel_configure(session: AccelSession) -> None:
    """Pytest calls `pytest_configure`. Not called in ranks."""


def pytest_accel_configure_rank(config: pytest.Config) -> None:
    """Pytest calls `pytest_configure` in a rank."""


def pytest_accel_marks_of_file(config: pytest.Config, path: Path, text: str) -> set[str]:  # type: ignore[empty-body]
    """Return names of the plugin's marks that tests of a file may get although they are not in its `text`."""


def pytest_accel_divide(config: pytest.Config, nodes: list[Any], selectable: bool) -> None:
    """Put a test for each entry in place of each of the collected `nodes` that has lists in its marks.

    `selectable` is True if the command line may select the new tests by their names.
    """


@pytest.hookspec(firstresult=True)
def pytest_accel_read_needs(session: AccelSession, items: Sequence[pytest.Item]) -> dict[pytest.Item, str] | None:
    """Store the `DriverLeases` of new items with the mark ``needs``; return the errors of those whose marks are wrong.

    Plugins have modified the list of items, which may then be selected and redirected.
    """


def pytest_accel_select(
    session: AccelSession,
    items: list[pytest.Item],
    found: dict[pytest.Item, Marks],
    redirector: Redirector,
    shard: tuple[int, int] | None,
) -> None:
    """Deselect items; `found` has those with marks."""


def pytest_accel_redirected(session: AccelSession, items: list[pytest.Item], redirected: Sequence[MarkedItem]) -> None:
    """New items run in worlds, and this process is to run tests. Raise ``pytest.UsageError`` if they cannot run."""


def pytest_accel_collection_finished(session: AccelSession, items: Sequence[pytest.Item]) -> None:
    """Marked tests were found, and `pytest_collection_finish` follows."""


def pytest_accel_workers_collected(session: AccelSession) -> None:
    """A worker of xdist has collected marked tests. Called in the controller."""


def pytest_accel_around_call(context: RankContext) -> AbstractContextManager[object] | None:
    """Return a context manager for the call of a test in this rank."""


@pytest.hookspec(firstresult=True)
def pytest_accel_make_launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Return the value of the fixture `launch`."""


@pytest.hookspec(firstresult=True)
def pytest_accel_make_faults(context: RankContext) -> AbstractContextManager[object] | None:
    """Return a context manager with the value of the fixture `faults` in a rank."""


@pytest.hookspec(firstresult=True)
def pytest_accel_open_fake_group(context: RankContext) -> object:
    """Return the store of the fake process group that this rank is about to open."""


@pytest.hookspec(firstresult=True)
def pytest_accel_connect_cluster(session: AccelSession) -> ClusterConnection | None:
    """Return the cluster whose machines run the tests."""


@pytest.hookspec(firstresult=True)
def pytest_accel_job_starter(here: LocalStarter, reports: StarterReports) -> Starter[Any] | None:
    """Return the starter of worlds that ``mpirun`` starts on this machine, whose leases `here` has."""


@pytest.hookspec(firstresult=True)
def pytest_accel_why_no_launcher(launcher: str) -> str | None:
    """Return why ``launcher`` cannot start ranks on this machine; None if it can."""
