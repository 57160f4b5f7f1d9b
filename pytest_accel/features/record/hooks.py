"""Calls of the kernel: the record of a session, and its present state on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.session import AccelSession


def pytest_accel_configure(session: AccelSession) -> None:
    from pytest_accel.features.record import record_hooks

    record_hooks.register(session)


def pytest_accel_redirected(session: AccelSession, items: list[pytest.Item], redirected: Sequence[MarkedItem]) -> None:
    if not session.is_worker and any(marked.missing is None for marked in redirected):
        from pytest_accel.features.record import live_hooks

        live_hooks.register(session)


def pytest_accel_workers_collected(session: AccelSession) -> None:
    from pytest_accel.features.record import live_hooks

    live_hooks.register(session)
