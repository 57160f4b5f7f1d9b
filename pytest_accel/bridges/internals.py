"""Checked access to internals of other plugins: an unsupported release is refused, and cannot give wrong results."""

from __future__ import annotations

from collections.abc import Iterator
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
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise pytest.UsageError(
            f"pytest-accel does not know {_release(plugin)} of {plugin}, which has no {', '.join(missing)}: "
            "install another release, or run marked tests without it"
        )


def of_class(config: pytest.Config, plugin: str, module: str, name: str) -> Any:
    """Return the object of the class `name` that `plugin` has registered with pytest; None if there is none.

    Raise `pytest.UsageError` if `module`, which belongs to `plugin`, lacks the class.
    """
    kind = take(plugin, module, name)
    return next((one for one in plugins(config) if isinstance(one, kind)), None)


def plugins(config: pytest.Config) -> Iterator[object]:
    """Yield all plugins that are registered with pytest. A plugin with several names occurs several times."""
    for _, plugin in config.pluginmanager.list_name_plugin():  # `get_plugins` fails if a plugin is not hashable.
        if plugin is not None:  # None stands for a plugin that ``-p no:NAME`` keeps out.
            yield plugin


def _release(plugin: str) -> str:
    try:
        return f"release {metadata.version(plugin)}"
    except metadata.PackageNotFoundError:
        return "this release"
