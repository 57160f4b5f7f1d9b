"""Tests of the check that refuses releases of pytest-testmon without the internals that ranks need."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_accel.features.plugins.internals import UnknownReleaseError
from pytest_accel.features.plugins.testmon import driver_plugin


def test_release_without_the_collector_that_ranks_need_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core: Any = ModuleType("testmon.testmon_core")
    configure: Any = ModuleType("testmon.configure")
    configure.header_collect_select = print
    for module in (ModuleType("testmon"), core, configure):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    collector = SimpleNamespace(
        start_testmon=print, discard_current=print, get_batch_coverage_data=dict, close=print, cov=None
    )
    manager = pytest.PytestPluginManager()
    manager.register(SimpleNamespace(testmon=collector), "TestmonCollect")
    config: Any = SimpleNamespace(pluginmanager=manager)
    with pytest.raises(UnknownReleaseError, match="TestmonCollector"):
        driver_plugin(config)
    core.TestmonCollector = object
    assert driver_plugin(config) is not None
