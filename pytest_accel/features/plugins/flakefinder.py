"""pytest-flakefinder: only the driver applies its time limit (``--flake-max-minutes``)."""

from __future__ import annotations

import pytest

from pytest_accel.features.plugins.internals import of_class, require
from pytest_accel.rank.context import RANK


def plugin(config: pytest.Config) -> None:
    """Remove the limit in a rank: the ranks of a world, whose clocks start at different times, could disagree."""
    finder = of_class(config, "pytest_flakefinder", "FlakeFinderPlugin")  # None without ``--flake-finder``.
    if finder is not None:
        require(finder, "expires")
        if RANK in config.stash:
            finder.expires = 0
