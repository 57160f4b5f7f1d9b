"""pytest-flakefinder: its time limit (``--flake-max-minutes``) is the driver's to judge."""

from __future__ import annotations

import pytest


def rank_plugin(config: pytest.Config) -> None:
    import pytest_flakefinder

    for plugin in config.pluginmanager.get_plugins():
        if isinstance(plugin, pytest_flakefinder.FlakeFinderPlugin):
            plugin.expires = 0  # The ranks of a world, which count from their starts, could disagree.
