"""pytest-profiling: the profile of a marked test is that of rank 0.

pytest-profiling runs the profiler around the whole protocol of a test, and writes the profile afterwards. In a rank the
profile ends when the report of the last phase is made, because it is sent to the driver with this report.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins import profiles
from pytest_accel.features.plugins.internals import leave_out, of_class, require
from pytest_accel.rank.context import RANK


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that profiles tests in rank 0; None in other ranks, and if nothing is profiled."""
    plugin = _plugin(config)
    if plugin is None:
        return None
    config.pluginmanager.unregister(plugin)
    return _InRank() if config.stash[RANK].rank == 0 else None


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that replaces the driver's profiles of marked tests, in which it waits, by rank 0's."""
    plugin = _plugin(config)
    return _InDriver(plugin) if plugin is not None else None


def without_bridge(config: pytest.Config) -> None:
    """Keep a rank from writing profiles, which would replace those of other ranks and of the driver."""
    leave_out(config, "pytest_profiling")


def _plugin(config: pytest.Config) -> Any:
    if not (config.getoption("profile") or config.getoption("profile_svg")):
        return None
    plugin = of_class(config, "pytest_profiling", "Profiling")
    require(plugin, "profs", "dir")
    return plugin


class _InRank:
    """Profiles each test, and sends the profile with the report of the teardown."""

    def __init__(self) -> None:
        self._profile: cProfile.Profile | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._profile = cProfile.Profile()
        self._profile.enable()
        try:
            return (yield)
        finally:
            self._end()

    def send(self, item: pytest.Item, report: pytest.TestReport) -> list[Any] | None:
        profile = self._end() if report.when == "teardown" else None
        return profiles.to_data(pstats.Stats(profile)) if profile is not None else None

    def _end(self) -> cProfile.Profile | None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.disable()
        return profile


class _InDriver:
    """Writes rank 0's profile of a marked test over the driver's."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self._sent: list[Any] | None = None
        """Rank 0's profile of the running test."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Replace the file that pytest-profiling's own wrapper, which runs inside of this one, has written."""
        marked = item.stash.get(MARKED, None)
        result = yield
        sent, self._sent = self._sent, None
        if marked is not None and marked.has_begun:
            path = self._plugin.profs[-1]
            if sent is not None:
                pstats.Stats(profiles.from_data(sent)).dump_stats(path)
            else:  # Rank 0 has died.
                # Remove all entries of the path: this test has overwritten profiles of tests with the same name.
                self._plugin.profs[:] = [other for other in self._plugin.profs if other != path]
                with suppress(OSError):
                    Path(path).unlink()
        return result

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, list[Any]]) -> None:
        self._sent = sent[0]
