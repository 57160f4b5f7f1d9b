"""An xdist worker's side: tells the controller what its tests need, and passes over tests that are on hold."""

from __future__ import annotations

from traceback import format_exc
from typing import Any, Protocol

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.session import AccelSession


class Channel(Protocol):
    """The part of `execnet.Channel` that is used."""

    def send(self, item: object) -> None: ...

    def setcallback(self, callback: Any, endmarker: object) -> None: ...


class WorkerHooks:
    """Registered in workers of a session whose tests may be ordered by what they need."""

    def __init__(self, session: AccelSession, channel: Channel) -> None:
        self._held = session.held
        self._channel = channel
        self._items: list[pytest.Item] = []
        self._error: str | None = None
        """Why orders are not received any more; None while they are."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Before xdist sends the list of tests, on the same connection: the controller has it when it schedules."""
        self._items = session.items
        wanted = [
            (index, marked.shape)
            for index, item in enumerate(session.items)
            if (marked := item.stash.get(MARKED, None)) is not None and marked.missing is None
        ]
        if wanted:
            from pytest_accel.core.shims import ask_before_each_test
            from pytest_accel.schedule.test_demand import Demand

            ask_before_each_test(session.config, self._passes_over)
            self._channel.setcallback(self._receive, endmarker=None)
            self._channel.send(Demand.of(wanted).pack())

    def _receive(self, message: tuple[str, int] | None) -> None:
        """In execnet's thread, which reads what xdist sends as well: a test is told of before it is sent."""
        if message is None:
            return
        try:
            order, index = message
            if order == "hold":
                self._held.add(self._items[index])
            else:
                self._held.discard(self._items[index])
        except Exception:  # execnet would close the channel, and say nothing.
            self._error = format_exc()
            raise

    def _passes_over(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Return whether `item` is on hold: another worker runs it, or this one later. No plugin hears of it now."""
        if item not in self._held:
            return False
        if self._error is not None:  # Passed over, it would never be reported, and the session would wait for it.
            raise RuntimeError(f"an order about the tests of this worker could not be handled:\n{self._error}")
        from pytest_accel.core.shims import teardown_to

        # The test before it has left the fixtures that the two have in common.
        call = pytest.CallInfo.from_call(lambda: teardown_to(item.session, nextitem), when="teardown")
        if call.excinfo is not None:
            report = item.ihook.pytest_runtest_makereport(item=item, call=call)
            item.ihook.pytest_runtest_logreport(report=report)
        return True
