"""Tests of the conditions under which a use of a plugin is refused, with stand-ins for the plugins."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins.refusals import refusals


class _Item:
    """A marked test that runs in `ranks`, and has other `marks`, too."""

    def __init__(self, marks: str = "", ranks: int = 2) -> None:
        self.stash = {MARKED: SimpleNamespace(key=SimpleNamespace(ranks=ranks))}
        self._marks = marks.split()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self._marks else None


def _refused(
    plugins: str, args: str, item: _Item, ini: dict[str, object] | None = None, **options: object
) -> list[str]:
    """Return what is refused in a session with `plugins` and the command line `args`, in which `item` is marked."""
    manager = pytest.PytestPluginManager()
    for name in plugins.split():
        manager.register(ModuleType(name), name)
    settings = {"addopts": [], **(ini or {})}

    def getini(name: str) -> object:
        if name not in settings:
            raise ValueError(f"unknown configuration value: {name!r}")
        return settings[name]

    config: Any = SimpleNamespace(
        pluginmanager=manager,
        invocation_params=SimpleNamespace(args=args.split()),
        getini=getini,
        option=SimpleNamespace(**options),
    )
    items: Any = [item]
    return list(refusals(config, items))


@pytest.mark.parametrize(
    ("plugin", "args", "item", "ini", "refused"),
    [
        ("pytest_regressions.plugin", "--force-regen", _Item(), {}, True),
        ("pytest_regressions.plugin", "", _Item(), {"addopts": ["--regen-all"]}, True),
        ("pytest_regressions.plugin", "", _Item(), {}, False),
        ("pytest_regressions.plugin", "--force-regen", _Item(ranks=1), {}, False),
        ("pytest_arraydiff.plugin", "--arraydiff-generate-path=x", _Item(), {}, False),
        ("pytest_arraydiff.plugin", "--arraydiff-generate-path=x", _Item("array_compare"), {}, True),
        ("pytest_mpl.plugin", "--mpl", _Item("mpl_image_compare", ranks=1), {"mpl-results-path": "x"}, True),
        ("pytest_mpl.plugin", "--mpl", _Item("mpl_image_compare"), {"mpl-results-path": ""}, False),
        ("pytest_isolate.plugin", "", _Item("isolate"), {}, True),
        ("pytest_isolate.plugin", "", _Item(), {"isolate_timeout": "9"}, True),
        ("pytest_isolate.plugin", "", _Item(), {}, False),
        ("pytest_isolate.plugin", "--no-isolate", _Item("isolate"), {}, False),
        ("pytest_isolate.plugin timeout", "--isolate", _Item("isolate"), {}, False),
        ("pytest_run_parallel.plugin", "", _Item("force_parallel_threads"), {}, True),
        ("pytest_run_parallel.plugin", "--parallel-threads=2", _Item("thread_unsafe"), {}, False),
        ("pytest_reportportal.plugin", "--reportportal", _Item(), {}, True),
        ("pytest_other", "--reportportal --force-regen", _Item(), {}, False),
    ],
)
def test_a_use_is_refused_if_marked_tests_use_the_plugin_in_this_way(
    plugin: str, args: str, item: _Item, ini: dict[str, object], refused: bool
) -> None:
    assert bool(_refused(plugin, args, item, ini)) == refused


@pytest.mark.parametrize(("strategy", "refused"), [("auto", False), ("update", True), ("update-none", False)])
def test_insta_is_refused_if_its_strategy_replaces_files(strategy: str, refused: bool) -> None:
    assert bool(_refused("pytest_insta.plugin", "", _Item(), insta=strategy)) == refused
