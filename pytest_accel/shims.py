"""The one place for what pytest and xdist offer no public way to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def base_temporary_directory(config: pytest.Config) -> Path | None:
    """The folder in which a session keeps its temporary directories; None where the tmpdir plugin is off.

    Public only as the fixture `tmp_path_factory`, and the ranks' folders are named before any test runs. xdist takes
    it from the same attribute for its workers.
    """
    factory = getattr(config, "_tmp_path_factory", None)
    return None if factory is None else Path(factory.getbasetemp())


def silent_terminal(config: pytest.Config) -> pytest.TerminalReporter:
    """A reporter that hears of nothing, and is there to be asked.

    Before pytest 9.1 a comparison in an assert asks it how to colour the explanation, and fails where there is none.
    """
    hooks = {name: None for name in dir(pytest.TerminalReporter) if name.startswith("pytest_")}
    silent: type[pytest.TerminalReporter] = type("SilentTerminalReporter", (pytest.TerminalReporter,), hooks)
    return silent(config, sys.stdout)


def teardown_for(item: pytest.Item) -> None:
    """Tear down what is set up and not `item`'s: fixtures kept for a test that did not come.

    The public hook, `pytest_runtest_teardown`, is about an item whose phases run, and its plugins fail for another.
    Raises what the fixtures raise.
    """
    item.session._setupstate.teardown_exact(item)


def forget_sections(item: pytest.Item) -> None:
    """Of a test that is run once more, the output that it was found to have written before."""
    item._report_sections.clear()
