"""Checked access to internals of other plugins: an unsupported release is refused, and cannot give wrong results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

import pytest


def take(plugin: str, module: str, name: str) -> Any:
    """Return the object `name` of `module`, which belongs to `plugin`. Raise `pytest.UsageError` if it is missing.

    `plugin` is the name of the distribution, such as ``pytest-mpl``.
    """
    found: Any
    try:
        found = import_module(module)
    except ImportError:
        found = None
    require(plugin, found, name)
    return getattr(found, name)


def require(plugin: str, owner: object, *names: str) -> None:
    """Raise `pytest.UsageError` if `owner`, an object of `plugin`, lacks one of the attributes `names`."""
    _refuse(plugin, [name for name in names if not hasattr(owner, name)])


def require_parameters(plugin: str, function: Callable[..., Any], *names: str) -> None:
    """Raise `pytest.UsageError` if `function` of `plugin` lacks a parameter of `names`, or requires another one."""
    parameters = inspect.signature(function).parameters
    required = {name for name, one in parameters.items() if one.default is one.empty}
    if not required <= set(names) <= parameters.keys():
        _refuse(plugin, [f"{function.__name__}({', '.join(names)})"])


def of_class(config: pytest.Config, plugin: str, module: str, name: str) -> Any:
    """Return the object of the class `name` that `plugin` has registered with pytest; None if there is none.

    Raise `pytest.UsageError` if `module`, which belongs to `plugin`, lacks the class.
    """
    kind = take(plugin, module, name)
    return next((one for _, one in named_plugins(config) if isinstance(one, kind)), None)


def named_plugins(config: pytest.Config) -> list[tuple[str, object]]:
    """Return all plugins that are registered with pytest, with their names. A plugin may have several names."""
    named = config.pluginmanager.list_name_plugin()  # `get_plugins` fails if a plugin is not hashable.
    return [(name, plugin) for name, plugin in named if plugin is not None]  # None: ``-p no:NAME`` keeps it out.


def _refuse(plugin: str, missing: list[str]) -> None:
    if missing:
        try:
            release = f"release {metadata.version(plugin)}"
        except metadata.PackageNotFoundError:
            release = "this release"
        raise pytest.UsageError(
            f"pytest-accel does not know {release} of {plugin}, which has no {', '.join(missing)}: "
            "install another release, or run marked tests without it"
        )
