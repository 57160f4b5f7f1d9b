"""Channels between xdist's controller and workers: the workers' tests with their needs, and orders to the workers."""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING, Any

from pytest_accel.features.order.hold_orders import HoldTest, RunHeldTest

if TYPE_CHECKING:
    from pytest_accel.features.order.test_demand import Demand


class Dispatch:
    """The plugin's own channels between the controller and the workers: receives the demand, sends orders."""

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
            self._channels[node].send(pickle.dumps(order))

    def _receive(self, data: bytes | None) -> None:
        if data is not None and self.demand is None:
            self.demand = pickle.loads(data)
