"""Plugins that work in a rank as in the main process, since `features/plugins` does what is right for ranks.

Such a plugin would do less in a process with `config.workerinput`, as xdist's workers have it, or expect data that it
sends to workers only if there is xdist.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from pytest_accel.core.plugin_roles import package_of
from pytest_accel.messages.world_spec import WORKER_VARIABLES

_PACKAGES = frozenset(
    {
        "inline_snapshot",  # Compares no snapshots.
        "pytest_bdd",  # Collects no steps for cucumber's report.
        "pytest_benchmark",  # Measures nothing.
        "pytest_jsonreport",  # Collects no metadata.
        "pytest_mpl",  # Expects the folder of the results.
        "pytest_mypy",  # Expects its settings.
        "pytest_randomly",  # Expects the seed, which is an option of ranks.
        "pytest_reportportal",  # Expects its service.
        "random_order",  # Expects the seed.
    }
)
"""Packages of the plugins, each with what it does in a worker."""
_HOOKS = ("pytest_configure", "pytest_sessionstart", "pytest_sessionfinish", "pytest_unconfigure")
_ATTRIBUTES = ("workerinput", "workeroutput")


class MainProcessPlugins:
    """Hides from these plugins, in the hooks of a session's start and end, that the process is like a worker."""

    def __init__(self) -> None:
        self._config: pytest.Config | None = None

    def pytest_plugin_registered(self, plugin: object, manager: pytest.PytestPluginManager) -> None:
        if package_of(plugin) not in _PACKAGES:
            return
        for caller in manager.get_hookcallers(plugin) or ():
            for implementation in caller.get_hookimpls() if caller.name in _HOOKS else ():
                if implementation.plugin is plugin:
                    implementation.function = self._hiding(implementation.function)  # type: ignore[misc]

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        self._config = config

    def _hiding(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: object) -> object:
            attributes = vars(self._config)
            variables = {name: os.environ.pop(name) for name in WORKER_VARIABLES if name in os.environ}
            values = {name: attributes.pop(name) for name in _ATTRIBUTES if name in attributes}
            try:
                return function(*args)
            finally:
                os.environ.update(variables)
                attributes.update(values)

        return call
