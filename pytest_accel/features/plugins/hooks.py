"""Calls of the kernel: the bridges to other plugins, in ranks and in drivers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_accel.features import plugins

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.session import AccelSession

_REGISTERED: pytest.StashKey[bool] = pytest.StashKey()


def configure_rank(config: pytest.Config) -> None:
    config.pluginmanager.register(_RankHooks(), "accel-bridges")


def redirected(session: AccelSession, items: list[pytest.Item], redirected: Sequence[MarkedItem]) -> None:
    """Register the bridges that receive other plugins' data from ranks, unless that has been done.

    Refuse plugins that do not work with ranks, unless this machine can run none of the `redirected` tests.
    """
    config = session.config
    runnable = [marked.item for marked in redirected if marked.missing is None]
    if runnable:
        plugins.refuse(config, runnable)
    if not config.stash.get(_REGISTERED, False):
        config.stash[_REGISTERED] = True
        for bridge in plugins.in_driver(config, runnable):
            config.pluginmanager.register(bridge)


class _RankHooks:
    """Registers the bridges of a rank."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None, object, object]:
        """Register the bridges after all plugins have been configured, and before these handle the session's start."""
        for bridge in plugins.in_rank(session.config):
            session.config.pluginmanager.register(bridge)
        return (yield)
