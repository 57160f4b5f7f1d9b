"""Uses of other plugins that are refused in a session with marked tests, and the conditions under which they are."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest

from pytest_accel.features.plugins.by_rank import number_of_ranks

Condition = Callable[[pytest.Config, Sequence[pytest.Item]], bool]
"""Returns whether a session with these marked tests uses a plugin in a certain way."""


def is_given(config: pytest.Config, *flags: str) -> bool:
    """Return whether one of `flags` is on the command line, in ``addopts`` or in ``PYTEST_ADDOPTS``.

    The names under which a plugin stores its options differ between releases.
    """
    words = [*config.invocation_params.args, *config.getini("addopts")]
    words += shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    return any(str(word).partition("=")[0] in flags for word in words)


def _is_set(config: pytest.Config, name: str) -> bool:
    """Return whether the ini file has a value for `name`. A release of a plugin may have no such setting."""
    try:
        return bool(config.getini(name))
    except ValueError:
        return False


def given(*flags: str) -> Condition:
    """Return the condition that one of the options `flags` is given."""
    return lambda config, items: is_given(config, *flags)


def marked(*marks: str) -> Condition:
    """Return the condition that a marked test has one of `marks`, too."""
    return lambda config, items: any(item.get_closest_marker(mark) for item in items for mark in marks)


def uses(fixture: str) -> Condition:
    """Return the condition that a marked test uses `fixture`."""
    return lambda config, items: any(fixture in getattr(item, "fixturenames", ()) for item in items)


def in_several_ranks(condition: Condition) -> Condition:
    """Return the condition that marked tests which run in more than one rank meet `condition`."""

    def applies(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
        several = [item for item in items if number_of_ranks(item) > 1]
        return bool(several) and condition(config, several)

    return applies


def both(first: Condition, second: Condition) -> Condition:
    """Return the condition that `first` and `second` hold."""
    return lambda config, items: first(config, items) and second(config, items)


def either(first: Condition, second: Condition) -> Condition:
    """Return the condition that `first` or `second` holds."""
    return lambda config, items: first(config, items) or second(config, items)


def named_plugins(config: pytest.Config) -> list[tuple[str, object]]:
    """Return all plugins that are registered with pytest, with their names. A plugin may have several names."""
    named = config.pluginmanager.list_name_plugin()  # `get_plugins` fails if a plugin is not hashable.
    return [(name, plugin) for name, plugin in named if plugin is not None]  # None: ``-p no:NAME`` keeps it out.


def is_loaded(config: pytest.Config, plugin: str) -> bool:
    """Return whether the session has loaded `plugin`: the name of a registered plugin, or of its module.

    A plugin is registered under the name of its entry point, or under its module's name if it was loaded with ``-p``.
    Two plugins may have entry points with the same name.
    """
    return any(plugin in (name, getattr(one, "__name__", None)) for name, one in named_plugins(config))


class Refusal(NamedTuple):
    """A use of a plugin that is refused in a session with marked tests."""

    plugin: str
    """The plugin's name (`is_loaded`)."""
    applies: Condition
    text: str
    """The error, one line: what does not work, and what to do instead."""


_DESELECT = "deselect marked tests (-m 'not distributed and not devices')"


def _files(plugin: str, applies: Condition, use: str, instead: str = _DESELECT) -> Refusal:
    """Return the refusal of a `use` of `plugin` that has all ranks write the same files. `instead` is what to do."""
    return Refusal(plugin, applies, f"{use} would have each rank of a marked test write the same files: {instead}")


def _forks(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    """Return whether pytest-isolate forks the process for a marked test."""
    if is_given(config, "--no-isolate") or any(is_loaded(config, name) for name in ("forked", "timeout")):
        return False  # pytest-isolate turns itself off next to these two plugins.
    limits = ("isolate_timeout", "isolate_mem_limit", "isolate_cpu_limit")
    flags = ("--isolate", "--forked", *(f"--{limit.replace('_', '-')}" for limit in limits))
    marks = ("isolate", "forked", "timeout")
    return is_given(config, *flags) or any(_is_set(config, limit) for limit in limits) or marked(*marks)(config, items)


def _measures_with_codspeed(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    plugin = config.pluginmanager.get_plugin("codspeed_plugin")
    by_option = is_given(config, "--codspeed") or "CODSPEED_ENV" in os.environ
    return bool(getattr(plugin, "is_codspeed_enabled", by_option))


def _runs_in_threads(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    """Return whether pytest-run-parallel runs a marked test in several threads."""
    by_option = is_given(config, "--parallel-threads")
    return any(
        by_option or item.get_closest_marker("parallel_threads") or item.get_closest_marker("force_parallel_threads")
        for item in items
        if not item.get_closest_marker("thread_unsafe")
    )


def _reports_to_portal(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    # Each rank would start its own launch. A rank that does not would lack the plugin's loggers.
    return bool(getattr(config.option, "rp_enabled", False)) or is_given(config, "--reportportal")


def _updates_with_insta(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    # By default pytest-insta only creates files that are missing.
    return getattr(config.option, "insta", None) in ("record", "review", "update")


def _images_in_folder(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    """Return whether pytest-mpl generates images, or has a folder for results. By default each rank has a folder.

    Hashes and the summary are written when a session ends, so that a rank would replace those of the driver.
    """
    flags = ("--mpl-generate-path", "--mpl-generate-hash-library", "--mpl-generate-summary", "--mpl-results-path")
    return is_given(config, *flags) or _is_set(config, "mpl-generate-summary") or _is_set(config, "mpl-results-path")


REFUSALS: tuple[Refusal, ...] = (
    _files(
        "pytest_arraydiff.plugin",
        in_several_ranks(both(given("--arraydiff-generate-path"), marked("array_compare"))),
        "--arraydiff-generate-path",
    ),
    _files("pytest_examples", given("--update-examples"), "--update-examples"),
    _files(
        "pytest_insta.plugin",
        in_several_ranks(_updates_with_insta),
        "--insta=update, record and review",
        f"use another strategy, or {_DESELECT}",
    ),
    _files(
        "pytest_mpl.plugin",
        both(_images_in_folder, marked("mpl_image_compare")),
        "pytest-mpl with a folder for images or results",
        f"use --mpl alone, or {_DESELECT}",
    ),
    _files(
        "pytest_regressions.plugin",
        in_several_ranks(given("--force-regen", "--regen-all")),
        "--force-regen and --regen-all",
    ),
    Refusal(
        "codspeed_plugin",
        _measures_with_codspeed,
        "pytest-codspeed cannot measure marked tests, which run in ranks: it runs a function for a fixed time, so that "
        f"ranks would run it unequally often; {_DESELECT}",
    ),
    Refusal(
        "pytest_deadfixtures",
        given("--dup-fixtures"),
        "--dup-fixtures cannot compare the fixtures of marked tests, whose values are in ranks: leave it out",
    ),
    Refusal(
        "pytest_flakefinder",
        given("--flake-max-minutes"),
        "--flake-max-minutes: ranks could disagree on the end, since each has its own clock; leave it out",
    ),
    Refusal(
        "pytest_isolate.plugin",
        _forks,
        "pytest-isolate runs a test in a fork of the pytest process, and limits that fork; it cannot isolate the ranks "
        "of a marked test: use --no-isolate; `fresh=True` gives a marked test new processes, and `timeout=` limits its "
        "time",
    ),
    Refusal(
        "pytest_reportportal.plugin",
        _reports_to_portal,
        "--reportportal: pytest-reportportal cannot report tests that run in ranks; "
        "leave the option out, and import the file of --junitxml into ReportPortal",
    ),
    Refusal(
        "pytest_run_parallel.plugin",
        _runs_in_threads,
        "pytest-run-parallel would mix up the collectives of a marked test, which runs in ranks: give the test the "
        "mark `thread_unsafe`, too",
    ),
)


def refusals(config: pytest.Config, items: Sequence[pytest.Item]) -> Iterator[str]:
    """Yield the text of each refusal that applies to the session and its marked tests `items`."""
    for refusal in REFUSALS:
        if is_loaded(config, refusal.plugin) and refusal.applies(config, items):
            yield refusal.text
