"""Tables and functions that decide which hooks of other plugins a rank calls.

A rank calls hooks that run a test, but not those that report or judge for a session. The rules apply to third-party
plugins: installed ones, and the objects that these register. pytest's own plugins, this plugin, conftests and a
project's own modules keep all their hooks. docs/reference/rank-sessions.md documents the tables below for users.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

import pytest

RoleName = Literal["absent", "fixtures", "test", "full"]

ROLES: Mapping[str, RoleName] = MappingProxyType(
    {
        "allure_pytest": "fixtures",  # Empties the folder of results.
        "buildkite_test_collector": "fixtures",  # Sends the session's results when the session ends.
        "flaky": "absent",  # Runs a failed test again, which the driver does with all ranks.
        "pytest_dependency": "absent",  # Skips tests by the outcomes of others, which the driver knows.
        "pytest_harvest": "fixtures",  # Stores its values as an xdist worker does, and the main process loads them.
        "pytest_html": "fixtures",  # Creates a folder beside its report.
        "pytest_isolate": "absent",  # Would fork the ranks.
        "pytest_nunit": "fixtures",  # Writes its file when the session ends.
        "pytest_order": "absent",  # Sorts in the driver; a rank collects only some of the files.
        "pytest_picked": "absent",  # Selects and orders tests by their state in git.
        "pytest_profiling": "absent",  # Writes a file for each test, and one for all when the session ends.
        "pytest_reportlog": "absent",  # Truncates its file.
        "pytest_rerunfailures": "absent",  # Runs a failed test again, as flaky does.
        "pytest_retry": "absent",  # Runs a failed test again, as flaky does.
        "pytest_split": "absent",  # Selects in the driver, and writes the durations of a session when it ends.
        "pytest_test_groups": "absent",  # Selects in the driver, and fails if it leaves no test of a file.
        "pytest_timeout": "absent",  # The driver applies its timeouts to all ranks.
        "teamcity": "fixtures",  # Records the running test, and fails if there is none.
        "testmon": "absent",  # Opens its database and selects tests.
        "vscode_pytest": "absent",  # Sends test results to the editor, from hooks of all kinds.
    }
)
"""Packages whose plugins do not have the role `test`, as all other third-party plugins do.

`absent`: only the plugin's options are registered. `fixtures`: its options and fixtures are; if it needs more in a
rank, `pytest_accel.features.plugins` does it. `full`: all its hooks are called.
"""


_OPTION_HOOKS = ("pytest_addoption", "pytest_addhooks")
_LISTENER_HOOKS = (
    *("pytest_runtest_logstart", "pytest_runtest_logreport", "pytest_runtest_logfinish"),
    "pytest_collectreport",
)
"""Hooks by which a plugin (one module or object) listens to reports."""
_REPORTER_HOOKS = (*_LISTENER_HOOKS, "pytest_terminal_summary")
"""Hooks by which a plugin listens to reports or writes a summary."""


_NEVER = frozenset(
    (
        *_REPORTER_HOOKS,
        *("pytest_runtestloop", "pytest_ignore_collect", "pytest_deselected", "pytest_warning_recorded"),
        *("pytest_exception_interact", "pytest_internalerror", "pytest_keyboard_interrupt"),
        *("pytest_report_header", "pytest_report_collectionfinish", "pytest_report_teststatus"),
    )
)
"""pytest's hooks that ranks do not call in plugins with the role `test`."""
_NOT_BESIDE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("pytest_sessionstart", "pytest_collection_finish"), _LISTENER_HOOKS),
        **dict.fromkeys(("pytest_sessionfinish", "pytest_unconfigure"), _REPORTER_HOOKS),
    }
)
"""Hooks that ranks do not call in a plugin with this role if the plugin has one of the others."""
_OWN = ("_pytest", "pytest", "pytest_accel")
_INSTALLED = {"site-packages", "dist-packages"}
"""Names of the folders into which packages are installed."""


@functools.cache
def published_plugins() -> Mapping[str, str]:
    """Return the top-level package of each installed plugin, by the name of its entry point."""
    entries = metadata.entry_points(group="pytest11")
    return {entry.name: entry.value.partition(":")[0].partition(".")[0] for entry in entries}


def chosen_roles(pluginmanager: pytest.PytestPluginManager, named: Iterable[tuple[str, bool]]) -> dict[str, RoleName]:
    """Return roles by module or package of the plugins in `named`: ``full`` if the value is True, else ``absent``.

    A name is a value of ``-p`` or the name of a package. Names that are not installed have no effect.
    """
    roles: dict[str, RoleName] = {}
    for name, full in named:
        plugin = pluginmanager.get_plugin(name)
        package = name.replace("-", "_")
        if plugin is not None:
            third_party = is_third_party(plugin)
            package = package_of(plugin) if third_party else module_of(plugin)
        roles[package] = "full" if full else "absent"
    return roles


def install(pluginmanager: pytest.PytestPluginManager, chosen: Mapping[str, RoleName]) -> None:
    """Make `pluginmanager` register only the hooks that a rank calls, for every plugin registered after this call.

    `chosen` has the roles that the user has given, by package.
    """
    roles = {**ROLES, **chosen}
    _register_only(pluginmanager, lambda plugin, hook, options: _is_called(plugin, hook, options, roles))


class OptionsOnly:
    """A plugin that makes pytest register, of third-party plugins, only the hooks that add options."""

    def pytest_addoption(self, pluginmanager: pytest.PytestPluginManager) -> None:
        """Restrict the hooks. pytest calls this when it registers the given plugins, before it loads any other."""
        _register_only(pluginmanager, lambda plugin, hook, options: hook in _OPTION_HOOKS or not is_third_party(plugin))


def _register_only(
    pluginmanager: pytest.PytestPluginManager, is_called: Callable[[object, str, Mapping[str, Any]], bool]
) -> None:
    """Make `pluginmanager` register only the implementations for which ``is_called(plugin, hook, options)`` is True.

    pluggy calls `PluginManager.parse_hookimpl_opts` to find out which attributes of a plugin are hooks, and documents
    that it may be overridden (https://pluggy.readthedocs.io/en/stable/api_reference.html).
    """
    options_of = pluginmanager.parse_hookimpl_opts

    def parse_hookimpl_opts(plugin: object, name: str) -> Any:
        options: Any = options_of(plugin, name)
        if options is None or is_called(plugin, options.get("specname") or name, options):
            return options
        return None

    vars(pluginmanager)["parse_hookimpl_opts"] = parse_hookimpl_opts


def leave_out_absent(pluginmanager: pytest.PytestPluginManager, chosen: Mapping[str, RoleName]) -> frozenset[str]:
    """Unregister the plugins whose role is `absent`, and return their modules' names; call after parsing options."""
    roles = {**ROLES, **chosen}
    named = pluginmanager.list_name_plugin()
    absent = {name: plugin for name, plugin in named if plugin is not None and _role(plugin, roles) == "absent"}
    for name in absent:
        pluginmanager.set_blocked(name)
    return frozenset(map(module_of, absent.values()))


def module_of(plugin: object) -> str:
    """Return the name of the module that `plugin` is, or from which an object comes; empty if it is unknown."""
    if isinstance(plugin, ModuleType):
        return plugin.__name__
    name = getattr(plugin, "__module__", None)
    return name if isinstance(name, str) else ""


def package_of(plugin: object) -> str:
    """Return the name of the top-level package that `plugin`, a module or an object, comes from."""
    return module_of(plugin).partition(".")[0]


def _role(plugin: object, roles: Mapping[str, RoleName]) -> RoleName:
    package = package_of(plugin)
    given = roles.get(module_of(plugin)) or roles.get(package)
    return given or ("test" if is_third_party(plugin) else "full")


def _is_called(plugin: object, hook: str, options: Mapping[str, Any], roles: Mapping[str, RoleName]) -> bool:
    if isinstance(plugin, pytest.TerminalReporter):
        return False  # Registered since plugins and conftests may look it up, but silent in a rank.
    role = _role(plugin, roles)
    if role in ("absent", "fixtures"):
        return hook in _OPTION_HOOKS
    if role == "full":
        return True
    # An implementation that is not a wrapper replaces the way a test runs, which only the driver may do.
    if hook == "pytest_runtest_protocol":
        return bool(options.get("wrapper") or options.get("hookwrapper"))
    return hook not in _NEVER and not any(hasattr(plugin, name) for name in _NOT_BESIDE.get(hook, ()))


def is_third_party(plugin: object) -> bool:
    """Return whether `plugin` is installed and is not a conftest of an installed package."""
    package = package_of(plugin)
    if package in _OWN:
        return False
    origin = getattr(sys.modules.get(module_of(plugin)), "__file__", None)
    if origin is None or Path(origin).name == "conftest.py":
        return False
    # A plugin in an editable install is outside site-packages, but publishes an entry point.
    return not _INSTALLED.isdisjoint(Path(origin).parts) or package in published_plugins().values()
