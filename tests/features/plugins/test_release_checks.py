"""Tests of the checks that find a release of another plugin without the internals that a bridge needs."""

from __future__ import annotations

import json.decoder
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_accel.features.plugins import BRIDGES
from pytest_accel.features.plugins.refusals import uses
from pytest_accel.features.plugins.testmon import driver_plugin
from pytest_accel.features.plugins.unknown_releases import (
    UnknownReleaseError,
    WithoutBridge,
    require,
    require_parameters,
    take,
)

_CONSEQUENCES = {
    bridge: getattr(import_module(f"pytest_accel.features.plugins.{bridge}"), "WITHOUT", None)
    for bridge in BRIDGES.values()
}


def test_release_without_a_required_name_is_found() -> None:
    assert take("json.decoder", "JSONDecoder") is json.decoder.JSONDecoder
    require(json.decoder, "JSONDecoder", "JSONDecodeError")
    with pytest.raises(UnknownReleaseError, match="Lost"):
        take("json.decoder", "Lost")
    with pytest.raises(UnknownReleaseError, match="Lost"):
        require(json.decoder, "JSONDecoder", "Lost")
    with pytest.raises(UnknownReleaseError, match="Lost"):
        take("json.absent", "Lost")


def _compare(new: object, old: object, limit: int = 3) -> None:
    """Take two required parameters and an optional one."""


def test_release_whose_function_has_other_parameters_is_found() -> None:
    require_parameters(_compare, "new", "old")
    require_parameters(_compare, "old", "new", "limit")
    for names in (("new", "old", "first"), ("new",)):
        with pytest.raises(UnknownReleaseError, match=rf"^_compare\({', '.join(names)}\)$"):
            require_parameters(_compare, *names)


def test_text_names_the_plugin_and_its_release() -> None:
    known = version("hypothesis")
    without = WithoutBridge("hypothesis")
    text = without.about(UnknownReleaseError("a, b"))
    assert text == f"pytest-accel does not know release {known} of hypothesis, which has no a, b"
    text = without.about(KeyError("c"))
    assert text == f"pytest-accel does not know release {known} of hypothesis (KeyError: 'c')"


def test_each_bridge_has_a_consequence() -> None:
    """That to pytest's own report has none: its errors are those of this plugin."""
    assert {bridge for bridge, one in _CONSEQUENCES.items() if one is None} == {"junit"}
    assert all(one.missing or one.damage for one in _CONSEQUENCES.values() if one is not None)


def test_the_reference_has_the_consequence_of_each_unknown_release() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "plugins.md").read_text(encoding="utf-8")
    section = page.partition("## Releases that pytest-accel does not know")[2].partition("\n## ")[0]
    table = section.partition("| --- ")[2].splitlines()
    rows = {
        cells[1]: cells[2:4] for cells in ([cell.strip() for cell in line.split("|")] for line in table) if cells[1:]
    }
    consequences = [one for one in _CONSEQUENCES.values() if one is not None]
    assert {one.plugin for one in consequences} == {name for name in rows if not name.startswith("-")}
    for one in consequences:
        missing, refused = rows[one.plugin]
        assert missing == one.missing
        assert refused.endswith(f": {one.damage}" if one.damage else "")
        assert bool(refused) == bool(one.damage)


def test_release_of_testmon_without_the_collector_that_ranks_need_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_unknown_release_is_refused_only_where_it_does_damage() -> None:
    """The plugin does damage to tests that use its fixture."""
    manager = pytest.PytestPluginManager()
    manager.register(ModuleType("some_plugin"), "some-name")
    config: Any = SimpleNamespace(pluginmanager=manager)
    without = WithoutBridge("hypothesis", damage="it would break", applies=uses("its_fixture"))
    using: Any = SimpleNamespace(fixturenames=["its_fixture"])
    other: Any = SimpleNamespace(fixturenames=["another"])
    error = UnknownReleaseError("a")
    assert without.refusal("some_plugin", error, config, [other]) is None
    assert WithoutBridge("hypothesis", "all").refusal("some_plugin", error, config, [using]) is None
    text = without.refusal("some_plugin", error, config, [other, using])
    assert text is not None
    assert text.endswith(
        "which has no a: it would break; install another release, or switch it off with -p no:some-name"
    )
