"""Calls of the kernel: the order of tests, in a process that runs them and in xdist's controller."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import pytest

from pytest_accel.features.order import stored_durations

if TYPE_CHECKING:
    from pytest_accel.core.world_key import WorldKey
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.session import AccelSession


def pytest_accel_configure(session: AccelSession) -> None:
    config = session.config
    if session.settings.durations is not None:
        stored_durations.recall(config)  # Raises an error if it is no such file.
        stored_durations.record_times(config)
    # The schedulers that let any worker run any test.
    if session.settings.schedule != "off" and getattr(config.option, "dist", "no") in ("load", "worksteal"):
        from pytest_accel.features.order.scheduler import AccelScheduling

        config.pluginmanager.register(AccelScheduling(config))


def pytest_accel_redirected(session: AccelSession, items: list[pytest.Item], redirected: Sequence[MarkedItem]) -> None:
    """Without xdist, have the times of tests stored, and bring tests of one world together if that is wanted."""
    if not session.is_worker:
        stored_durations.record_times(session.config)
        if session.settings.schedule == "always":
            from pytest_accel.features.order.tasks import planned

            groups: dict[WorldKey | None, list[pytest.Item]] = {}  # Each is at the place of its first test.
            for item, plan in planned(items):
                groups.setdefault(None if plan is None or plan.missing else plan.key, []).append(item)
            items[:] = chain.from_iterable(groups.values())


def pytest_accel_collection_finished(session: AccelSession, items: list[pytest.Item]) -> None:
    """In an xdist worker, send the needs of the tests to the controller, if it may order the tests.

    They arrive before xdist's list of the tests, which follows on the same connection.
    """
    if session.is_worker:
        from pytest_accel.compat.xdist_shims import pass_over_hints
        from pytest_accel.features.order.tasks import CHANNEL, need_of, planned
        from pytest_accel.messages.struct_messages import encode

        needs = [need_of(item, plan, session.machine) for item, plan in planned(items)]
        channel = (session.worker_input or {}).get(CHANNEL)
        if channel is not None and any(needs):
            pass_over_hints(session.config, lambda is_hint: setattr(session, "next_is_hint", is_hint))
            channel.send(encode(needs))
