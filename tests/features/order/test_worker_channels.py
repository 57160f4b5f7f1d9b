"""Tests of an xdist worker that fails to handle an order of the scheduler: it raises and does not skip its tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from msgspec import msgpack

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
    orders._receive(msgpack.encode(HoldTest(0)))
    with pytest.raises(IndexError):
        orders._receive(msgpack.encode(RunHeldTest(1)))
    with pytest.raises(RuntimeError, match=r"(?s)an order about the tests of this worker .*IndexError: list index"):
        orders._passes_over(item, None)
    session.held.clear()
    assert not orders._passes_over(item, None)
