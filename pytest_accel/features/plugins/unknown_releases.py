"""What happens to marked tests with a release of a plugin that its bridge does not know.

The tests run. What the plugin reports of them is missing, and one warning says so. The plugin is refused only where
its data would be destroyed or a verdict would be wrong. docs/reference/plugins.md shows the table to users.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from types import MappingProxyType
from typing import NamedTuple

import pytest

from pytest_accel.features.plugins.internals import UnknownReleaseError, named_plugins

Applies = Callable[[pytest.Config, Sequence[pytest.Item]], bool]
"""Returns whether one of these marked tests uses a plugin in the way that does damage."""


class WithoutBridge(NamedTuple):
    """The consequence of an unknown release of one plugin."""

    plugin: str
    """The name of its distribution."""
    missing: str = ""
    """What is missing for marked tests; empty: nothing."""
    damage: str = ""
    """Why the plugin is refused; empty: it is not."""
    applies: Applies = lambda config, items: True
    """Whether `damage` applies to a session."""


def is_given(config: pytest.Config, *flags: str) -> bool:
    """Return whether one of `flags` is on the command line, in ``addopts`` or in ``PYTEST_ADDOPTS``.

    The names under which a plugin stores its options may have changed.
    """
    words = [*config.invocation_params.args, *config.getini("addopts")]
    words += shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    return any(str(word).partition("=")[0] in flags for word in words)


def _given(*flags: str) -> Applies:
    return lambda config, items: is_given(config, *flags)


def _marked(*marks: str) -> Applies:
    return lambda config, items: any(item.get_closest_marker(mark) for item in items for mark in marks)


def _uses(fixture: str) -> Applies:
    return lambda config, items: any(fixture in getattr(item, "fixturenames", ()) for item in items)


def _all(*conditions: Applies) -> Applies:
    return lambda config, items: all(condition(config, items) for condition in conditions)


def _any(*conditions: Applies) -> Applies:
    return lambda config, items: any(condition(config, items) for condition in conditions)


def _isolates(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    limits = ("isolate_timeout", "isolate_mem_limit", "isolate_cpu_limit")
    if is_given(config, "--no-isolate"):
        return False
    for limit in limits:
        with suppress(ValueError):  # The setting has another name.
            if config.getini(limit):
                return True
    flags = ("--isolate", *(f"--{limit.replace('_', '-')}" for limit in limits))
    return _any(_given(*flags), _marked("isolate", "forked"))(config, items)


def _cannot_be_disabled(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    return not hasattr(config.pluginmanager.get_plugin("pytest-benchmark"), "disabled")


_FORKS = "it would fork the pytest process for marked tests"
CONSEQUENCES: Mapping[str, WithoutBridge] = MappingProxyType(
    {
        "allure": WithoutBridge("allure-pytest", "steps, attachments, fixtures and other data of ranks"),
        "approvals": WithoutBridge("approvaltests", damage="ranks would overwrite each other's received files"),
        "array_files": WithoutBridge(
            "pytest-arraydiff",
            damage="each rank would write the reference files",
            applies=_all(_given("--arraydiff-generate-path"), _marked("array_compare")),
        ),
        "bdd": WithoutBridge("pytest-bdd", "the steps of scenarios"),
        "benchmark": WithoutBridge(
            "pytest-benchmark",
            "the statistics, and their functions run once",
            "ranks would run functions unequally often",
            _cannot_be_disabled,
        ),
        "buildkite": WithoutBridge("buildkite-test-collector", "the spans of ranks"),
        "ctrf": WithoutBridge("pytest-json-ctrf", "the metadata of ranks"),
        "dependency": WithoutBridge(
            "pytest-dependency", "the outcomes of other tests in ranks, where pytest_dependency.depends() needs them"
        ),
        "django": WithoutBridge("pytest-django", damage="ranks would share their test databases"),
        "durations": WithoutBridge("pytest-durations", "the times of ranks"),
        "flakefinder": WithoutBridge(
            "pytest-flakefinder",
            damage="ranks could disagree on the end of --flake-max-minutes",
            applies=_given("--flake-max-minutes"),
        ),
        "forked": WithoutBridge("pytest-forked", damage=_FORKS, applies=_any(_given("--forked"), _marked("forked"))),
        "harvest": WithoutBridge("pytest-harvest", "results bags and saved fixtures"),
        "html": WithoutBridge("pytest-html", "the extras of ranks"),
        "hypothesis_results": WithoutBridge("hypothesis", "the statistics (--hypothesis-show-statistics) and patches"),
        "inline_snapshot": WithoutBridge(
            "inline-snapshot",
            damage="marked tests could pass with values that are not stored (with --inline-snapshot=disable they run)",
            applies=lambda config, items: config.getoption("inline_snapshot", None) != "disable",
        ),
        "insta": WithoutBridge(
            "pytest-insta", damage="each rank would write and delete snapshots", applies=_uses("snapshot")
        ),
        "isolate": WithoutBridge("pytest-isolate", damage=_FORKS, applies=_isolates),
        "json_report": WithoutBridge("pytest-json-report", "the metadata, output and log records of ranks"),
        "line_profiler": WithoutBridge("pytest-line-profiler", "the profiles"),
        "memray": WithoutBridge("pytest-memray", "the recordings"),
        "metadata": WithoutBridge("pytest-metadata", "the metadata that ranks change"),
        "monitor": WithoutBridge("pytest-monitor", "the measurements of ranks"),
        "mpl_images": WithoutBridge(
            "pytest-mpl",
            damage="ranks would overwrite each other's images",
            applies=_all(
                _given("--mpl", "--mpl-generate-path", "--mpl-generate-hash-library", "--mpl-generate-summary"),
                _marked("mpl_image_compare"),
            ),
        ),
        "nunit": WithoutBridge("pytest-nunit", "the properties and attachments of ranks"),
        "print": WithoutBridge("pytest-print", "the lines of ranks"),
        "profiling": WithoutBridge("pytest-profiling", "the profiles"),
        "pytest_order": WithoutBridge(
            "pytest-order",
            damage="marked tests that cannot be ordered would pass",
            applies=_given("--error-on-failed-ordering"),
        ),
        "pytest_snapshot": WithoutBridge(
            "pytest-snapshot",
            damage="each rank would write or delete snapshots",
            applies=_given("--snapshot-update", "--allow-snapshot-deletion"),
        ),
        "recording": WithoutBridge(
            "pytest-recording", damage="ranks would overwrite each other's cassettes", applies=_marked("vcr")
        ),
        "regressions": WithoutBridge(
            "pytest-regressions",
            damage="each rank would write the expected files",
            applies=_given("--force-regen", "--regen-all"),
        ),
        "run_parallel": WithoutBridge("pytest-run-parallel", damage="threads of a rank would mix up its collectives"),
        "syrupy": WithoutBridge(
            "syrupy",
            damage="the snapshots of marked tests would count as unused, and --snapshot-update would delete them",
            applies=_uses("snapshot"),
        ),
        "teamcity": WithoutBridge("teamcity-messages", "both sides of failed comparisons"),
        "testmon": WithoutBridge(
            "pytest-testmon",
            damage="marked tests would be deselected although code that their ranks execute has changed",
        ),
        "xprocess": WithoutBridge(
            "pytest-xprocess", damage="ranks would terminate each other's processes", applies=_uses("xprocess")
        ),
    }
)
"""The consequence for each bridge, by its module. The bridge to pytest's own ``junitxml`` has none."""


def refusal(
    name: str, bridge: str, error: Exception, config: pytest.Config, items: Sequence[pytest.Item]
) -> str | None:
    """Return why `items` must not run with the plugin `name`, whose `bridge` raised `error`; None if they may."""
    one = CONSEQUENCES[bridge]
    if not (one.damage and one.applies(config, items)):
        return None
    text = f"{about(bridge, error)}: {one.damage}"
    return f"{text}; install another release, or switch it off with {_switch_off(config, name)}"


def is_needed(bridge: str) -> bool:
    """Return whether an error of `bridge` while a test runs must fail the test: otherwise only data is missing."""
    return bridge not in CONSEQUENCES or bool(CONSEQUENCES[bridge].damage)


def about(bridge: str, error: Exception | str) -> str:
    """Return the beginning of the text on an unknown release: which one, and what `error` says about it."""
    plugin = CONSEQUENCES[bridge].plugin
    if isinstance(error, UnknownReleaseError):
        why = f", which has no {error}"
    elif isinstance(error, str):
        why = f" ({error})"
    else:
        why = f" ({type(error).__name__}: {error})"
    return f"pytest-accel does not know {_release(plugin)} of {plugin}{why}"


def _release(plugin: str) -> str:
    """Return the words for the installed release of `plugin`."""
    try:
        return f"release {metadata.version(plugin)}"
    except metadata.PackageNotFoundError:
        return "this release"


def _switch_off(config: pytest.Config, plugin: str) -> str:
    """Return the option that keeps pytest from loading `plugin`, the name of a registered plugin or of its module."""
    names = (name for name, one in named_plugins(config) if plugin in (name, getattr(one, "__name__", None)))
    return f"-p no:{next(names, plugin)}"


class Warnings:
    """Warns once of what is missing for marked tests, for each bridge. There is one in each driver."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._warned: set[str] = set()
        # All workers would say the same of the collection.
        self._is_silent = getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] != "gw0"

    def warn(self, bridge: str, text: str, *, in_test: bool = False) -> None:
        """Warn that the results of `bridge` are missing; `text` says why. Each worker runs its own tests (`in_test`).

        The warning is passed to pytest's hook: a filter that makes it an error would end the session.
        """
        missing = CONSEQUENCES[bridge].missing
        if (self._is_silent and not in_test) or bridge in self._warned or not missing:
            return
        self._warned.add(bridge)
        warning = pytest.PytestWarning(f"{text}: of marked tests, it lacks {missing}")
        message = warnings.WarningMessage(warning, type(warning), __file__, 0)
        self._config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, "nodeid": "", "when": "config", "location": None}
        )
