"""Calls of the kernel: the order of tests, in a process that runs them and in xdist's controller."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.order import stored_durations

if TYPE_CHECKING:
    from pytest_accel.core.world_key import WorldKey
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.features.order.rule import RunOrder
    from pytest_accel.features.order.test_demand import Demand
    from pytest_accel.session import AccelSession

PLUGIN = "accel-order"
"""Name of the plugin of the controller, an :class:`OrderHooks`."""
_CHANNEL = "accel_order"
"""Key of xdist's `workerinput` for the channel through which a worker sends the :class:`Demand` of its tests."""


def pytest_accel_configure(session: AccelSession) -> None:
    config = session.config
    if session.settings.durations is not None:
        stored_durations.check_file(config)
        stored_durations.record_times(config)
    # The schedulers that let any worker run any test.
    if session.settings.schedule != "off" and getattr(config.option, "dist", "no") in ("load", "worksteal"):
        config.pluginmanager.register(OrderHooks(session), PLUGIN)


def pytest_accel_redirected(session: AccelSession, items: list[pytest.Item], redirected: Sequence[MarkedItem]) -> None:
    """Without xdist, have the times of tests stored, and bring tests of one world together if that is wanted."""
    if not session.is_worker:
        stored_durations.record_times(session.config)
        if session.settings.schedule == "always":
            items[:] = by_world(items)


def pytest_accel_collection_finished(session: AccelSession, items: list[pytest.Item]) -> None:
    """In an xdist worker, send the needs of the tests to the controller, if it may order the tests.

    They arrive before xdist's list of the tests, which follows on the same connection.
    """
    given = session.worker_input or {}
    if _CHANNEL in given:
        from pytest_accel.core.shims import pass_over_hints
        from pytest_accel.core.struct_messages import encode
        from pytest_accel.features.order.test_demand import Demand, wanted_by

        demand = Demand.of(map(wanted_by, items))
        if any(demand.tests):
            pass_over_hints(session.config, lambda is_hint: setattr(session, "next_is_hint", is_hint))
            given[_CHANNEL].send(encode(demand))


def by_world(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return `items` in groups of the same world key, each at the position of its first test.

    Tests that need no world, or that the machine cannot run, are one further group. The order within a group does not
    change, so modules and classes stay contiguous in it.
    """
    groups: dict[WorldKey | None, list[pytest.Item]] = {}
    for item in items:
        marked = item.stash.get(MARKED, None)
        groups.setdefault(marked.key if marked is not None and marked.missing is None else None, []).append(item)
    return [item for group in groups.values() for item in group]


class OrderHooks:
    """Replaces xdist's scheduler if tests need worlds. Registered in the controller."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._received: list[bytes] = []
        """The demands that workers have sent, all the same. Threads receive them, and cannot decode two at a time."""

    @cached_property
    def demand(self) -> Demand | None:
        """The needs of the tests, after the collection; None if no test needs a world or a resource."""
        from pytest_accel.core.struct_messages import decode
        from pytest_accel.features.order.test_demand import Demand

        return decode(self._received[0], Demand) if self._received else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        channel = node.workerinput[_CHANNEL] = node.gateway.newchannel()
        channel.setcallback(self._received.append)

    @pytest.hookimpl(optionalhook=True, wrapper=True, trylast=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config) -> Generator[None, Any, Any]:
        scheduler = yield
        # Keep a scheduler that another plugin has made.
        if type(scheduler).__module__.partition(".")[0] != "xdist":
            return scheduler
        from pytest_accel.features.order.scheduler import AccelScheduling

        return AccelScheduling(config, scheduler, self._make_order)

    def _make_order(self, collection: list[str]) -> RunOrder | None:
        if self.demand is None:
            return None
        config, machine = self._session.config, self._session.machine
        tests = list(zip(collection, self.demand.kinds_of_tests(), strict=True))
        times = stored_durations.expected_times(stored_durations.recall(config), tests)
        stored_durations.record_times(config)
        return self.demand.order(collection, machine, machine.slots, times)
