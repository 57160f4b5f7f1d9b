"""Tests of the hooks of a suite for which ranks wait with the call of a test."""

from __future__ import annotations

from types import ModuleType

import pytest

from pytest_accel import hooks
from pytest_accel.driver.item_hooks import may_stop_call


@pytest.mark.parametrize(
    ("hook", "waits"),
    [
        *((f"pytest_runtest_{name}", True) for name in ("protocol", "setup", "call", "makereport", "logreport")),
        *(("pytest_accel_merge", True), ("pytest_runtest_teardown", False), ("pytest_runtest_logstart", False)),
    ],
)
def test_each_hook_that_may_stop_a_test_before_its_call_is_known(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, hook: str, waits: bool
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    config = pytester.parseconfig()
    config.pluginmanager.add_hookspecs(hooks)
    assert not may_stop_call(config)
    plugin = ModuleType("of_the_suite")
    exec(f"def {hook}(): ...", vars(plugin))
    config.pluginmanager.register(plugin)
    assert may_stop_call(config) is waits
