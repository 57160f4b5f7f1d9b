"""Plugins and options of plugins that are refused in a session with marked tests, and have no bridge."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from pytest_accel.features.plugins.internals import named_plugins
from pytest_accel.features.plugins.unknown_releases import is_given


class Refusal(NamedTuple):
    """A use of a plugin that is refused in a session with marked tests."""

    plugin: str
    """The plugin's name (`is_loaded`)."""
    applies: Callable[[pytest.Config], bool]
    """A function that returns whether the session uses the plugin in the refused way."""
    text: str
    """The error, one line: what does not work, and what to do instead."""


def _option(name: str, flag: str) -> Callable[[pytest.Config], bool]:
    """Return a function that checks whether the option `name` (argparse's `dest`), which `flag` sets, is set.

    In an unknown release of the plugin, its name may be another one.
    """

    def is_set(config: pytest.Config) -> bool:
        return bool(getattr(config.option, name, False)) or is_given(config, flag)

    return is_set


def _measures_with_codspeed(config: pytest.Config) -> bool:
    plugin = config.pluginmanager.get_plugin("codspeed_plugin")
    by_option = is_given(config, "--codspeed") or "CODSPEED_ENV" in os.environ
    return bool(getattr(plugin, "is_codspeed_enabled", by_option))


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "codspeed_plugin",
        _measures_with_codspeed,
        "pytest-codspeed cannot measure marked tests, which run in ranks: it runs a function for a fixed time, so that "
        "ranks would run it unequally often; leave these tests out of the session "
        "(-m 'not distributed and not devices')",
    ),
    Refusal(
        "pytest_deadfixtures",
        _option("showrepeated", "--dup-fixtures"),
        "--dup-fixtures cannot compare the fixtures of marked tests, whose values are in ranks: leave it out",
    ),
    Refusal(
        "pytest_reportportal.plugin",
        # Each rank would start its own launch. A rank that does not would lack the plugin's loggers.
        _option("rp_enabled", "--reportportal"),
        "--reportportal: pytest-reportportal cannot report tests that run in ranks; "
        "leave the option out, and import the file of --junitxml into ReportPortal",
    ),
    Refusal(
        "pytest_examples",
        _option("update_examples", "--update-examples"),
        "--update-examples would have each rank of a marked test change the files: leave it out, or use -p no:accel",
    ),
)


def is_loaded(config: pytest.Config, plugin: str) -> bool:
    """Return whether the session has loaded `plugin`: the name of a registered plugin, or of its module.

    A plugin is registered under the name of its entry point, or under its module's name if it was loaded with ``-p``.
    Two plugins may have entry points with the same name.
    """
    return any(plugin in (name, getattr(one, "__name__", None)) for name, one in named_plugins(config))


def refusals(config: pytest.Config) -> Iterator[str]:
    """Yield the text of each refusal that applies to the session."""
    for refusal in REFUSALS:
        if is_loaded(config, refusal.plugin) and refusal.applies(config):
            yield refusal.text
