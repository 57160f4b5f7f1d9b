"""pytest-forked: the driver is not forked for a marked test, which runs in other processes anyway.

A marked test that is to be forked has a fresh world (`pytest_accel.item_redirection`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins.refusals import either, given, marked
from pytest_accel.features.plugins.unknown_releases import WithoutBridge, take

WITHOUT = WithoutBridge(
    "pytest-forked",
    damage="it would fork the pytest process for marked tests",
    applies=either(given("--forked"), marked("forked")),
)

_MODULE = "pytest_forked"

Protocol = Callable[[pytest.Item, "pytest.Item | None"], object]
"""Runs a test: a `pytest_runtest_protocol`."""


def driver_plugin(config: pytest.Config) -> object:
    """Replace the plugin, all of whose other hooks have been called already."""
    protocol = take(_MODULE, "pytest_runtest_protocol")
    config.pluginmanager.unregister(import_module(_MODULE))
    return _InDriver(protocol)


class _InDriver:
    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        return None if MARKED in item.stash else self._protocol(item, nextitem)
