"""The conversation between xdist's controller and a worker about the order of tests, over an execnet channel.

The worker sends the needs of its tests once, a :class:`Demand`. The controller sends orders: to skip a test that xdist
has sent to the worker (`HoldTest`), and to run it after all (`RunHeldTest`). `scheduler.py` says what for. execnet
keeps the order of the messages of a connection, also with those of xdist.
"""

from __future__ import annotations

import contextlib
from traceback import format_exc
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import Struct

from pytest_accel.core.shims import ask_before_each_test, tear_down_after
from pytest_accel.core.struct_messages import decode, encode

if TYPE_CHECKING:
    from pytest_accel.features.order.test_demand import Demand
    from pytest_accel.pool.pool_client import Channel
    from pytest_accel.session import AccelSession


class HoldTest(Struct, frozen=True, tag=True):
    """Skip the test with the number `index` in the collection until :class:`RunHeldTest`."""

    index: int


class RunHeldTest(Struct, frozen=True, tag=True):
    """Run the test with the number `index`, which was on hold."""

    index: int


class WorkerChannels:
    """The channels to all workers, owned by the controller: they receive the demand, and send orders."""

    def __init__(self) -> None:
        self.demand: Demand | None = None
        """The tests' needs, as the first worker has sent them (all send the same); None if no test needs a world."""
        self._channels: dict[Any, Any] = {}

    def connect(self, node: Any) -> None:
        """Create the channel to a worker that is about to be started."""
        channel = self._channels[node] = node.gateway.newchannel()
        node.workerinput["accel_schedule"] = channel
        channel.setcallback(self._receive, endmarker=None)

    def hold(self, node: Any, index: int) -> None:
        """Order the worker to skip a test until :meth:`go`."""
        self._send(node, HoldTest(index))

    def go(self, node: Any, index: int) -> None:
        """Order the worker to run a test that was on hold."""
        self._send(node, RunHeldTest(index))

    def _send(self, node: Any, order: HoldTest | RunHeldTest) -> None:
        with contextlib.suppress(OSError):  # The worker has died; xdist detects that itself.
            self._channels[node].send(encode(order))

    def _receive(self, data: bytes | None) -> None:
        """Receive the demand of a worker, in the thread of this worker."""
        if data is not None and self.demand is None:
            from pytest_accel.features.order.test_demand import Demand

            self.demand = decode(data, Demand)


class HeldTests:
    """A worker's side: sends the needs of its tests, and skips tests that are on hold."""

    def __init__(self, session: AccelSession, channel: Channel, items: list[pytest.Item]) -> None:
        """Send the needs before xdist sends its list of tests on the same connection.

        The controller thus has them when it begins to schedule.
        """
        from pytest_accel.features.order.test_demand import Demand, wanted_by

        self._held = session.held
        self._items = items
        self._error: str | None = None
        """Traceback of the error after which no orders are received any more; None if there was none."""
        demand = Demand.of(map(wanted_by, items))
        if demand.tests:
            ask_before_each_test(session.config, self._passes_over)
            channel.setcallback(self._receive, endmarker=None)
            channel.send(encode(demand))

    def _receive(self, data: bytes | None) -> None:
        """Handle an order of the controller.

        Called in execnet's receiver thread, which also receives xdist's messages, in the order in which they were sent:
        a test is put on hold before the worker is to run it.
        """
        if data is None:
            return
        try:
            order = decode(data, HoldTest | RunHeldTest)
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
