"""Calls of the kernel: the order of tests, in a process that runs them and in xdist's controller."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.order import stored_durations
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.core.world_key import WorldKey
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.features.order.test_demand import Demand
    from pytest_accel.features.order.worker_channels import WorkerChannels
    from pytest_accel.session import AccelSession

PLUGIN = "accel-order"
"""Name of the plugin of the controller, an :class:`OrderHooks`."""
_SCHEDULABLE = ("load", "worksteal")
"""The values of ``--dist`` that let the scheduler run any test in any worker."""


def configure(session: AccelSession) -> None:
    config = session.config
    if session.settings.durations is not None:
        stored_durations.check_file(config)
        stored_durations.record_times(config)
    if options.is_distributed(config) and session.settings.schedule != "off" and config.option.dist in _SCHEDULABLE:
        config.pluginmanager.register(OrderHooks(session), PLUGIN)


def redirected(session: AccelSession, items: list[pytest.Item], redirected: Sequence[MarkedItem]) -> None:
    """Without xdist, have the times of tests stored, and bring tests of one world together if that is wanted."""
    if session.is_worker:
        return
    stored_durations.record_times(session.config)
    if session.settings.schedule == "always":
        items[:] = by_world(items)


def collection_finished(session: AccelSession, items: list[pytest.Item]) -> None:
    """In an xdist worker, send the needs of the tests to the controller, if it may order the tests."""
    given = session.worker_input or {}
    if "accel_schedule" in given:
        from pytest_accel.features.order.worker_channels import HeldTests

        HeldTests(session, given["accel_schedule"], items)


def by_world(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return `items` in groups of the same world key, each at the position of its first test.

    Tests that need no world, or that the machine cannot run, are one further group. The order within a group does not
    change, so modules and classes stay contiguous in it: their fixtures are set up once in each world, and once in
    this process.
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
        self._channels: WorkerChannels | None = None

    @property
    def demand(self) -> Demand | None:
        """The needs of the tests; None if no test needs a world."""
        return None if self._channels is None else self._channels.demand

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        from pytest_accel.features.order.worker_channels import WorkerChannels

        self._channels = self._channels or WorkerChannels()
        self._channels.connect(node)

    @pytest.hookimpl(optionalhook=True, wrapper=True, trylast=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config) -> Generator[None, Any, Any]:
        scheduler = yield
        # Keep a scheduler that another plugin has made.
        if self._channels is None or type(scheduler).__module__.partition(".")[0] != "xdist":
            return scheduler
        from pytest_accel.features.order.scheduler_choice import AccelScheduling

        return AccelScheduling(config, scheduler, self._channels, lambda: self._session.machine)
