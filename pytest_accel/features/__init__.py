"""The features of the plugin: optional parts, each a folder or a module, which plug into the kernel.

`FEATURES` is their only table. The module ``features/NAME/hooks.py``, or ``features/NAME.py`` if there is no more, is a
plugin of pytest: it implements hooks of pytest, and hooks by which the kernel calls features
(``pytest_accel/hooks.py``). `register` registers it when the session needs it; other sessions import none of its
modules. The kernel knows no feature by name. To delete a feature, delete its folder or module, its row here, its names
in ``pytest_accel.__init__``, and its tests in ``tests/features``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple

import pytest

from pytest_accel.core.marks import NEEDS, registered
from pytest_accel.core.stash_keys import SESSION, is_xdist_worker
from pytest_accel.settings import options

Occasion = Literal[
    "start",  # The command line is known, and no conftest has been imported. Not in ranks.
    "configure",  # Pytest configures a session. Not in ranks.
    "configure_rank",
    "lists",  # A mark has a list, or "all".
    "needs",  # A test has the mark `needs`.
    "marked",  # Tests are to run in worlds.
    "call",  # A rank is about to call a test.
    "launch",  # A test requests the fixture `launch`.
    "faults",
    "fake_group",
    "cluster",
    "launcher",  # A mark names one.
]
"""The occasions on which the kernel calls `register`."""
Condition = Callable[[pytest.Config], bool]


class Feature(NamedTuple):
    """A feature, and when a session registers it."""

    name: str
    """Name of its folder or module."""
    occasions: Mapping[Occasion, Condition]
    """The occasions on which it is registered, each with the condition for that."""
    stands_on: tuple[str, ...] = ()
    """Names of the features from which it imports."""
    commands: tuple[str, ...] = ()
    """Its commands of ``python -m pytest_accel``, the keys of `COMMANDS` in `command_module`."""
    command_module: str = "hooks"


def _always(config: pytest.Config) -> bool:
    return True


def _adopts(config: pytest.Config) -> bool:
    """Return whether the ini file adds marks to tests."""
    return bool(config.getini(options.RULES) or config.getini(options.ADOPT))


def _is_launched(config: pytest.Config) -> bool:
    """Return whether this process and others that a launcher has started are to be one session."""
    if not options.sees_launchers(config):
        return False
    from pytest_accel.core import launcher_env

    return launcher_env.find_here() is not None


def _orders(config: pytest.Config) -> bool:
    """Return whether the order of tests under xdist, or their times, are the plugin's matter from the beginning on."""
    session = config.stash[SESSION]
    if session.is_worker:
        return False
    return session.settings.durations is not None or options.is_distributed(config)


def _plans(config: pytest.Config) -> bool:
    """Return whether the session plans. Works before the command line is fully parsed."""
    return getattr(config.known_args_namespace, options.PLAN, None) is not None


def _selects(config: pytest.Config) -> bool:
    """Return whether the session runs some of the tests, by their needs, in parts or by arguments of their marks."""
    settings = config.stash[SESSION].settings
    return settings.select is not None or settings.shard is not None or compares_arguments(config)


def compares_arguments(config: pytest.Config) -> bool:
    """Return whether ``-m`` compares arguments of the plugin's marks."""
    return re.search(r"\b(devices|distributed)\s*\(", getattr(config.option, "markexpr", "")) is not None


def _records(config: pytest.Config) -> bool:
    """Return whether the events of the session are recorded."""
    return shows_in_ci() or any(options.output_path(config, option) is not None for option in options.FILES)


def shows_in_ci() -> bool:
    """Return True if GitHub should show the session's summary, since no test has started the session."""
    return bool(os.environ.get("GITHUB_STEP_SUMMARY")) and "PYTEST_CURRENT_TEST" not in os.environ


def _has_jitter(config: pytest.Config) -> bool:
    return options.find(config, options.JITTER) is not None


def _has_resources(config: pytest.Config) -> bool:
    return options.find(config, options.RESOURCES) is not None


def _owns_needs(config: pytest.Config) -> bool:
    """Return whether marks ``needs`` are the plugin's. Without ``accel_resources``, the project may own them."""
    return _has_resources(config) or NEEDS not in registered(config.getini("markers"))


FEATURES = (
    Feature("early_start", {"start": lambda config: not is_xdist_worker()}),
    Feature("adoption", {"configure": _adopts, "configure_rank": _adopts}),
    Feature("launchers", {"start": _is_launched, "launcher": _always}, stands_on=("launch",)),
    Feature("ray", {"cluster": _always}, stands_on=("launchers",)),
    Feature(
        "order",
        {"configure": _orders, "needs": _owns_needs, "marked": _always},
        commands=("durations",),
        command_module="stored_durations",
    ),
    Feature("planning", {"start": _plans, "configure": _selects}, stands_on=("order",)),
    Feature(
        "record",
        {"configure": _records, "marked": _always},
        commands=("trace", "report", "summary", "census"),
        command_module="commands",
    ),
    Feature("plugins", {"configure_rank": _always, "marked": _always}),
    Feature("properties", {"call": lambda config: "hypothesis" in sys.modules}),
    Feature("launch", {"launch": _always}),
    Feature("faults", {"configure": _has_jitter, "configure_rank": _has_jitter, "faults": _always}),
    Feature("fake_group", {"fake_group": _always}),
    Feature("sizes", {"lists": _always}),
    Feature(
        "resources",
        {"configure": _has_resources, "configure_rank": _has_resources, "needs": _owns_needs},
    ),
    Feature(
        "doctor",
        {"configure": lambda config: config.getoption(options.INFO) and not config.stash[SESSION].is_worker},
        commands=("info", "doctor"),
    ),
)
"""All features, in the order in which they are registered."""


def register(config: pytest.Config, occasion: Occasion) -> bool:
    """Register the features that `config` needs on `occasion`, as far as they are not; return whether there are any."""
    plugins, needed = config.pluginmanager, False
    for feature in FEATURES:
        if occasion in feature.occasions and feature.occasions[occasion](config):
            module = _load(feature.name)
            needed |= plugins.is_registered(module) or plugins.register(module) is not None
    return needed


def require(config: pytest.Config, occasion: Occasion) -> Any:
    """Register as `register` does; return the hooks. Raise ``pytest.UsageError`` if no feature serves `occasion`."""
    if not register(config, occasion):
        raise pytest.UsageError(f"this installation of pytest-accel lacks the feature for {occasion!r}")
    return config.hook


def commands() -> list[str]:
    """Return the names of all commands."""
    return [name for feature in FEATURES for name in feature.commands]


def command(name: str) -> Any:
    """Return the function of the command `name`, which gets the arguments, and returns an exit status."""
    (module,) = (_load(feature.name, feature.command_module) for feature in FEATURES if name in feature.commands)
    return module.COMMANDS[name]


def _load(name: str, module: str = "hooks") -> Any:
    """Return a module of a feature, or its only module. Raise ``pytest.UsageError`` if it cannot be imported."""
    try:
        feature = import_module(f"{__name__}.{name}")
        return import_module(f"{feature.__name__}.{module}") if hasattr(feature, "__path__") else feature
    except ImportError as error:
        raise pytest.UsageError(f"pytest-accel: the feature {name!r} cannot be imported: {error}") from error
