"""Releases of plugins that a bridge does not know: how they are found, and what happens to marked tests.

A bridge checks the internals of its plugin before a test runs. If some are missing, the tests run. What the plugin
reports of them is missing, and one warning says so. The plugin is refused only where its data would be destroyed or a
verdict would be wrong. docs/reference/plugins.md shows the consequence for each bridge to users.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import Any, NamedTuple

import pytest

from pytest_accel.core.plugin_roles import package_of
from pytest_accel.features.plugins.refusals import Condition, named_plugins


class UnknownReleaseError(Exception):
    """Raised if a plugin lacks internals that its bridge needs. The message has their names."""


def take(module: str, name: str) -> Any:
    """Return the object `name` of a plugin's `module`. Raise :class:`UnknownReleaseError` if it is missing."""
    found: Any
    try:
        found = import_module(module)
    except ImportError:
        found = None
    require(found, name)
    return getattr(found, name)


def require(owner: object, *names: str) -> None:
    """Raise :class:`UnknownReleaseError` if `owner`, an object of a plugin, lacks one of the attributes `names`."""
    _refuse([name for name in names if not hasattr(owner, name)])


def require_parameters(function: Callable[..., Any], *names: str) -> None:
    """Raise :class:`UnknownReleaseError` if a plugin's `function` lacks a parameter of `names`, or requires another."""
    parameters = inspect.signature(function).parameters
    required = {name for name, one in parameters.items() if one.default is one.empty}
    if not required <= set(names) <= parameters.keys():
        _refuse([f"{function.__name__}({', '.join(names)})"])


def _refuse(missing: list[str]) -> None:
    if missing:
        raise UnknownReleaseError(", ".join(missing))


def leave_out(config: pytest.Config, package: str, hook: str = "") -> None:
    """Unregister all plugins of `package`, with whatever names and classes; with `hook`, those that implement it."""
    for plugin in {id(plugin): plugin for _, plugin in named_plugins(config)}.values():
        if package_of(plugin) == package and (not hook or hasattr(plugin, hook)):
            config.pluginmanager.unregister(plugin)


class WithoutBridge(NamedTuple):
    """The consequence of an unknown release of a plugin: its marked tests run without the bridge, or are refused."""

    plugin: str
    """The name of its distribution."""
    missing: str = ""
    """The data that marked tests lack without the bridge; empty if they lack none."""
    damage: str = ""
    """Why the plugin is refused; empty: it is not."""
    applies: Condition = lambda config, items: True
    """Returns True if `damage` applies to a session."""

    def about(self, error: Exception | str) -> str:
        """Return the beginning of the text on an unknown release: which one, and what `error` says about it."""
        if isinstance(error, UnknownReleaseError):
            why = f", which has no {error}"
        elif isinstance(error, str):
            why = f" ({error})"
        else:
            why = f" ({type(error).__name__}: {error})"
        return f"pytest-accel does not know {_release(self.plugin)} of {self.plugin}{why}"

    def refusal(self, name: str, error: Exception, config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
        """Return why `items` must not run with the plugin `name`, whose bridge raised `error`; None if they may."""
        if not (self.damage and self.applies(config, items)):
            return None
        text = f"{self.about(error)}: {self.damage}"
        return f"{text}; install another release, or switch it off with {_switch_off(config, name)}"


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
    """Warns once of what is missing for marked tests, for each plugin. There is one in each driver."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._warned: set[str] = set()
        # All workers would say the same of the collection.
        self._is_silent = getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] != "gw0"

    def warn(self, without: WithoutBridge, error: Exception | str, *, in_test: bool = False) -> None:
        """Warn that results are missing, since a bridge raised `error`. Each worker runs its own tests (`in_test`).

        The warning is passed to pytest's hook: a filter that makes it an error would end the session.
        """
        plugin, missing = without.plugin, without.missing
        if (self._is_silent and not in_test) or plugin in self._warned or not missing:
            return
        self._warned.add(plugin)
        warning = pytest.PytestWarning(f"{without.about(error)}: of marked tests, it lacks {missing}")
        message = warnings.WarningMessage(warning, type(warning), __file__, 0)
        self._config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, "nodeid": "", "when": "config", "location": None}
        )
