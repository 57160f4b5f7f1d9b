"""Checked access to internals of other plugins, so that an unknown release is found before a test runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from pytest_accel.core.plugin_roles import package_of


class UnknownReleaseError(Exception):
    """Raised if a plugin lacks internals. The message has their names (`unknown_releases.py` has the consequences)."""


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


def of_class(config: pytest.Config, module: str, name: str) -> Any:
    """Return the object of the class `name` that a plugin has registered with pytest; None if there is none.

    Raise :class:`UnknownReleaseError` if the plugin's `module` lacks the class.
    """
    kind = take(module, name)
    return next((one for _, one in named_plugins(config) if isinstance(one, kind)), None)


def named_plugins(config: pytest.Config) -> list[tuple[str, object]]:
    """Return all plugins that are registered with pytest, with their names. A plugin may have several names."""
    named = config.pluginmanager.list_name_plugin()  # `get_plugins` fails if a plugin is not hashable.
    return [(name, plugin) for name, plugin in named if plugin is not None]  # None: ``-p no:NAME`` keeps it out.


def leave_out(config: pytest.Config, package: str, hook: str = "") -> None:
    """Unregister all plugins of `package`, with whatever names and classes; with `hook`, those that implement it."""
    for plugin in {id(plugin): plugin for _, plugin in named_plugins(config)}.values():
        if package_of(plugin) == package and (not hook or hasattr(plugin, hook)):
            config.pluginmanager.unregister(plugin)


def _refuse(missing: list[str]) -> None:
    if missing:
        raise UnknownReleaseError(", ".join(missing))
