"""Tests of the conversation between xdist's controller and its workers about the order of tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from pytest_accel.core.struct_messages import encode
from pytest_accel.features.order.worker_channels import HeldTests, HoldTest, RunHeldTest


class _Channel:
    """An execnet channel that drops everything."""

    def send(self, item: object) -> None:
        pass

    def setcallback(self, callback: Any, endmarker: object) -> None:
        pass


class _Item:
    """A test item without marks."""

    stash: Mapping[object, object] = MappingProxyType({})


def test_a_held_test_raises_the_error_of_an_order_that_could_not_be_handled() -> None:
    session: Any = SimpleNamespace(held=set())
    item: Any = _Item()
    orders = HeldTests(session, _Channel(), [item])
    orders._receive(encode(HoldTest(0)))
    with pytest.raises(IndexError):
        orders._receive(encode(RunHeldTest(1)))
    with pytest.raises(RuntimeError, match=r"(?s)an order about the tests of this worker .*IndexError: list index"):
        orders._passes_over(item, None)
    session.held.clear()
    assert not orders._passes_over(item, None)


_RECEIVE = """
import sys
from threading import Barrier, Thread

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.struct_messages import encode
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.order.test_demand import Demand
from pytest_accel.features.order.worker_channels import WorkerChannels

sys.setswitchinterval(1e-6)
key = WorldKey("cpu", DeviceNeed(1), 2, grouped=True)
data = encode(Demand.of([(key, key)]))
channels, barrier = WorkerChannels(), Barrier(16)


def receive():
    barrier.wait()
    channels._receive(data)


threads = [Thread(target=receive) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert channels.demand == Demand.of([(key, key)])
"""


def test_many_workers_may_send_their_demand_at_the_same_time() -> None:
    """A new interpreter, in which msgspec has not used the type before."""
    run = subprocess.run([sys.executable, "-c", _RECEIVE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
