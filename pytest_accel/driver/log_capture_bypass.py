"""The hooks of a marked item in the driver: all but those that belong to the processes that run the test, its ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pytest_accel.core.plugin_roles import package_of
from pytest_accel.core.shims import left_out_conftests

_OF_THE_PROCESS = ("pytest_factoryboy", "pytest_socket")
"""Packages whose hooks around the phases of a test act on the process and the fixtures of the test."""
_NONE: frozenset[object] = frozenset()
_PHASES = ("pytest_runtest_setup", "pytest_runtest_call", "pytest_runtest_teardown")


class _Hooks:
    """Made once a session for each set of conftests that do not apply to a file."""

    def __init__(self, config: pytest.Config, conftests: frozenset[object]) -> None:
        self._manager = config.pluginmanager
        self._conftests = conftests

    def __getattr__(self, name: str) -> Any:
        left_out = {self._manager.get_plugin("logging-plugin"), *self._conftests}
        if name in _PHASES:
            left_out |= {one for _, one in self._manager.list_name_plugin() if package_of(one) in _OF_THE_PROCESS}
        caller = self._manager.subset_hook_caller(name, left_out - {None})
        setattr(self, name, caller)
        return caller


_RELAY: pytest.StashKey[dict[frozenset[object], _Hooks]] = pytest.StashKey()


@functools.cache
def without_ranks_hooks(kind: type[pytest.Item]) -> type[pytest.Item]:
    """Return `kind`, its hooks less those that belong to ranks.

    It is the ranks that log, and they capture. In the driver the capture costs more than all else that the driver does
    for a test (see `let_loggers_propagate`).
    """

    class Redirected(kind):  # type: ignore[valid-type, misc]
        @property
        def ihook(self) -> Any:
            hooks = super().ihook
            if isinstance(hooks, _Hooks):  # Of a copied item, redirected once more.
                return hooks
            conftests = _NONE if hooks is self.config.hook else left_out_conftests(hooks)
            relays = self.config.stash.setdefault(_RELAY, {})
            if conftests not in relays:
                relays[conftests] = _Hooks(self.config, conftests)
            return relays[conftests]

    Redirected.__name__, Redirected.__qualname__, Redirected.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    return Redirected
