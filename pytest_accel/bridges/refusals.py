"""Plugins that cannot run marked tests, or not with some of their options, and have no bridge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest


class Refusal(NamedTuple):
    """A use of a plugin that is refused in a session with marked tests."""

    plugin: str
    """Its name (`is_loaded`)."""
    applies: Callable[[pytest.Config], bool]
    """Tells from the options whether the session uses what is refused."""
    text: str
    """One line: what cannot work, and what to do."""


def _compares_fixtures(config: pytest.Config) -> bool:
    return bool(config.getoption("showrepeated", False))


def _updates_examples(config: pytest.Config) -> bool:
    return bool(config.getoption("update_examples", False))


_DUPLICATES = "--dup-fixtures cannot compare the fixtures of marked tests, whose values are in ranks: leave it out"
_EXAMPLES = "--update-examples would have each rank of a marked test change the files: leave it out, or use -p no:accel"
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "codspeed_plugin",
        lambda config: bool(getattr(config.pluginmanager.get_plugin("codspeed_plugin"), "is_codspeed_enabled", True)),
        "pytest-codspeed cannot measure marked tests, which run in ranks: it runs a function for a time, and so "
        "unequally often on each rank; leave these tests out of the session (-m 'not distributed and not devices')",
    ),
    Refusal("pytest_deadfixtures", _compares_fixtures, _DUPLICATES),
    Refusal(
        "pytest_reportportal.plugin",
        # Each rank would start a launch of its own, and a rank that does not would lack the plugin's loggers.
        lambda config: bool(config.option.rp_enabled),
        "--reportportal: pytest-reportportal cannot report tests that run in ranks; "
        "leave the option out, and import the file of --junitxml into ReportPortal",
    ),
    Refusal("pytest_examples", _updates_examples, _EXAMPLES),
)


def is_loaded(config: pytest.Config, plugin: str) -> bool:
    """Return whether the session has `plugin`: the name under which it is registered, or that of its module.

    The first is that of an entry point, unless ``-p`` has named the module. Two plugins may have the same.
    """
    loaded = config.pluginmanager.list_name_plugin()  # Not `get_plugins`, which fails if one cannot be hashed.
    return any(one is not None and plugin in (name, getattr(one, "__name__", None)) for name, one in loaded)


def refusals(config: pytest.Config) -> Iterator[str]:
    """Give the text of each refusal that applies to the session."""
    for refusal in REFUSALS:
        if is_loaded(config, refusal.plugin) and refusal.applies(config):
            yield refusal.text
