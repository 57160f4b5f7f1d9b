"""Tests of the hooks of a suite for which ranks wait with the call of a test."""

from __future__ import annotations

from types import ModuleType

import pytest

from pytest_accel import hooks
from pytest_accel.driver.item_hooks import may_stop_call


@pytest.mark.parametrize(
    ("hook", "package", "waits"),
    [
        *((f"pytest_runtest_{name}", "suite", True) for name in ("protocol", "setup", "call", "makereport")),
        *(("pytest_runtest_logreport", "suite", True), ("pytest_accel_merge", "suite", True)),
        *((f"pytest_runtest_{name}", "suite", False) for name in ("teardown", "logstart")),
        *(("pytest_runtest_protocol", "pytest_timeout", False), ("pytest_runtest_makereport", "pytest_html", False)),
    ],
)
def test_each_hook_that_may_stop_a_test_before_its_call_is_known(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, hook: str, package: str, waits: bool
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    config = pytester.parseconfig()
    config.pluginmanager.add_hookspecs(hooks)
    assert not may_stop_call(config)
    plugin = ModuleType(package)
    exec(f"def {hook}(): ...", vars(plugin))
    config.pluginmanager.register(plugin)
    assert may_stop_call(config) is waits
