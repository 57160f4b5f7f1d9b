"""The hooks around the tests themselves, registered only where there are marked ones."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from pytest_accel.core.world_key import WorldShape
from pytest_accel.driver.items import MarkedItem, marked_of
from pytest_accel.schedule.history import Recorder
from pytest_accel.schedule.test_demand import NO_DEVICE, kind_of
from pytest_accel.session import AccelSession


class RunningHooks:
    """Brings each marked item its world, and its report the ranks' words."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._driver = session.driver
        self._post_mortem: Any = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if self._session.is_worker:
            _link_neighbours(session.items)
        else:
            _link(session.items)
            session.config.pluginmanager.register(Recorder(_kinds(session.items)), "accel-durations")
        # The ranks debug themselves: of their failures the driver has nothing to look at.
        plugin = session.config.pluginmanager
        self._post_mortem = plugin.unregister(name="pdbinvoke") if plugin.has_plugin("pdbinvoke") else None

    @pytest.hookimpl
    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        marked = marked_of(node)
        if self._post_mortem is not None and (marked is None or not marked.has_begun):
            self._post_mortem.pytest_exception_interact(node, call, report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        marked = marked_of(item)
        if marked is None:
            return (yield)
        if self._session.is_copy:
            pytest.exit("a process that a test forked came back out of the test: it has no ranks", returncode=1)
        if nextitem in self._session.held:
            nextitem = None  # It may be another worker's.
        following = marked_of(nextitem) if nextitem is not None else None
        if self._session.is_worker:
            # Only the next test is known, and other workers' tests may come between it and a later one.
            same = following is not None and following.missing is None and following.shape == marked.shape
            marked.following = following if same and not marked.shape.fresh else None
            marked.last = marked.shape.fresh
        if not any(item.iter_markers("skip")):
            self._driver.prepare(marked, following)
        try:
            return (yield)
        finally:
            self._driver.after(following)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """pytest-timeout's limit is kept for a marked item in its own way: its timer would stop, or end, the driver."""
        marked = marked_of(item)
        if marked is None:
            return None
        marked.limit(settings.timeout)
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        marked = marked_of(item)
        if marked is None:
            return None
        marked.limit(None)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        marked = marked_of(item)
        if marked is not None:
            marked.conclude(report, call.excinfo.value if call.excinfo is not None else None)
        return report


class Graft:
    """Puts the ranks' words into a marked item's report before any other plugin sees it."""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        marked = marked_of(item)
        if marked is not None:
            marked.graft(report, call)
        return report


def by_world(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests of one world together, where the first of them was; so are those that need none, or lack hardware.

    Within each group the order stays, and with it modules and classes that were in one piece: their fixtures are set
    up once in each world, and once in this process.
    """
    groups: dict[WorldShape | None, list[pytest.Item]] = {}
    for item in items:
        marked = marked_of(item)
        groups.setdefault(marked.shape if marked is not None and marked.missing is None else None, []).append(item)
    return [item for group in groups.values() for item in group]


def _kinds(items: list[pytest.Item]) -> dict[str, str]:
    """The kind of device that each test uses, by node id."""
    marked = {item.nodeid: marked_of(item) for item in items}
    return {nodeid: NO_DEVICE if one is None else kind_of(one.shape) for nodeid, one in marked.items()}


def _link_neighbours(items: list[pytest.Item]) -> None:
    """Tell each test which one a worker of xdist probably runs next: its neighbour, if it is of the same shape.

    A worker knows which test is next only when the one before begins. Ranks that go on to a test ahead of that need
    to know which fixtures stay after it. Where the guess is wrong, they end, or are set up, once more.
    """
    for item, later in pairwise(items):
        marked, following = marked_of(item), marked_of(later)
        if marked is not None and following is not None and following.missing is None:
            same = following.shape == marked.shape and not marked.shape.fresh
            marked.following = following if same else None


def _link(items: list[pytest.Item]) -> None:
    """Tell each test which one comes next in a world of its shape."""
    later: dict[WorldShape, MarkedItem] = {}
    for item in reversed(items):
        marked = marked_of(item)
        if marked is None or marked.missing is not None:
            continue
        marked.following = None if marked.shape.fresh else later.get(marked.shape)
        marked.last = marked.following is None
        later[marked.shape] = marked
