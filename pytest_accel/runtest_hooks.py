"""Hooks of the driver while tests run. Registered only in sessions with marked tests."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.items import MarkedItem, marked_of
from pytest_accel.session import AccelSession


class RuntestHooks:
    """Gets a world for each marked item, applies the time limits of pytest-timeout to it, and completes its reports."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._driver = session.driver

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if not self._session.is_worker:
            _link(session.items)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        marked = marked_of(item)
        if marked is None:
            return (yield)
        if self._session.is_forked_copy:
            text = "a process that a test forked has returned from the test; only the original process has ranks"
            pytest.exit(text, returncode=1)
        following = marked_of(nextitem) if nextitem is not None else None
        if self._session.is_worker:
            # A worker knows only its next test; another worker may use the world before a later test.
            same_key = following is not None and following.missing is None and following.key == marked.key
            marked.following = following if same_key and not marked.key.fresh else None
            marked.last = marked.key.fresh
        try:
            if not any(item.iter_markers("skip")):
                self._driver.prepare(marked)
            return (yield)
        except KeyboardInterrupt:
            if not self._session.is_forked_copy:
                self._driver.interrupt()  # The ranks may run the test although the driver was not waiting for them.
            raise
        finally:
            # Another worker may get the test of a hint, and then needs the world: give it back to the pool, where it
            # stays warm. Its ranks keep the fixtures of that test.
            self._driver.after(None if self._session.next_is_hint else following)
            marked.forget_run()
            vars(marked).pop("node", None)  # A session may have 20,000 tests.
            vars(item).pop("ihook", None)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Apply pytest-timeout's limit to a marked item without its timer, which would interrupt or kill the driver."""
        marked = marked_of(item)
        if marked is None:
            return None
        marked.limits.limit_test(settings.timeout)
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        marked = marked_of(item)
        if marked is None:
            return None
        marked.limits.limit_test(None)
        return True

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the ranks' merged report in place of a marked item's own, before any other plugin sees it."""
        report = yield
        marked = marked_of(item)
        if marked is not None:
            marked.complete_report(report, call)
        return report

    @pytest.hookimpl(wrapper=True, specname="pytest_runtest_makereport")
    def pytest_conclude_report(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        marked = marked_of(item)
        if marked is not None:
            marked.conclude_report(report)
        return report


def _link(items: list[pytest.Item]) -> None:
    """Set `following` of each test to the next test of the same key, and `last` if there is none."""
    later: dict[WorldKey, MarkedItem] = {}
    for item in reversed(items):
        marked = marked_of(item)
        if marked is None or marked.missing is not None:
            continue
        marked.following = None if marked.key.fresh else later.get(marked.key)
        marked.last = marked.following is None
        later[marked.key] = marked
