"""The side of an xdist worker: it sends the tests' needs to the controller, and skips tests that are on hold.

`controller.py` has the controller's side.
"""

from __future__ import annotations

import pickle
from traceback import format_exc
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.shims import ask_before_each_test, tear_down_after
from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.order.hold_orders import HoldTest
from pytest_accel.features.order.test_demand import Demand
from pytest_accel.session import AccelSession

if TYPE_CHECKING:
    from pytest_accel.pool.pool_client import Channel


class WorkerOrders:
    """Sends the needs of a worker's tests, and receives orders about them."""

    def __init__(self, session: AccelSession, channel: Channel, items: list[pytest.Item]) -> None:
        """Send the needs before xdist sends its list of tests on the same connection.

        The controller thus has them when it begins to schedule.
        """
        self._held = session.held
        self._items = items
        self._error: str | None = None
        """Traceback of the error after which no orders are received any more; None if there was none."""
        keys = [
            (index, marked.key)
            for index, item in enumerate(items)
            if (marked := item.stash.get(MARKED, None)) is not None and marked.missing is None
        ]
        if keys:
            ask_before_each_test(session.config, self._passes_over)
            channel.setcallback(self._receive, endmarker=None)
            channel.send(Demand.of(keys).pack())

    def _receive(self, data: bytes | None) -> None:
        """Handle an order of the controller.

        Called in execnet's receiver thread, which also receives xdist's messages, in the order in which they were sent:
        a test is put on hold before the worker is to run it.
        """
        if data is None:
            return
        try:
            order = pickle.loads(data)
            item = self._items[order.index]
            if isinstance(order, HoldTest):
                self._held.add(item)
            else:
                self._held.discard(item)
        except Exception:  # execnet closes the channel without a message.
            self._error = format_exc()
            raise

    def _passes_over(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Return whether to skip `item`, which is on hold: another worker runs it, or this one later.

        In place of the skipped test, this tears down the fixtures that `nextitem` does not use.
        """
        if item not in self._held:
            return False
        if self._error is not None:
            # Raise to prevent a hang: the order to run the test may be lost, and the session would wait for its report.
            raise RuntimeError(f"an order about the tests of this worker could not be handled:\n{self._error}")
        tear_down_after(item, nextitem)  # The previous test has kept the fixtures that it shares with `item`.
        return True
