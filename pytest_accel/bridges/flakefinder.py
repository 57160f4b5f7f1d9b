"""pytest-flakefinder: only the driver applies its time limit (``--flake-max-minutes``)."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.bridges.internals import of_class, require

_NAME = "pytest-flakefinder"


def rank_plugin(config: pytest.Config) -> None:
    """Remove the limit in a rank: the ranks of a world, whose clocks start at different times, could disagree."""
    plugin = _finder(config)
    if plugin is not None:
        plugin.expires = 0


def driver_plugin(config: pytest.Config) -> None:
    """Refuse a release whose limit has another name: it would stay in force in ranks."""
    plugin = _finder(config)
    if plugin is not None:
        require(_NAME, plugin, "expires")


def _finder(config: pytest.Config) -> Any:
    """Return the plugin's object that repeats tests; None without ``--flake-finder``."""
    return of_class(config, _NAME, "pytest_flakefinder", "FlakeFinderPlugin")
