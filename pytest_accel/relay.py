"""The hooks of a marked item in the driver: all but those that capture log records."""

from __future__ import annotations

import functools
from typing import Any

import pytest


class _HooksWithoutLogging:
    """Made once a session."""

    def __init__(self, config: pytest.Config) -> None:
        self._manager = config.pluginmanager

    def __getattr__(self, name: str) -> Any:
        plugin = self._manager.get_plugin("logging-plugin")
        caller = self._manager.subset_hook_caller(name, [plugin] if plugin is not None else [])
        setattr(self, name, caller)
        return caller


_RELAY: pytest.StashKey[_HooksWithoutLogging] = pytest.StashKey()


@functools.cache
def without_log_capture(kind: type[pytest.Item]) -> type[pytest.Item]:
    """`kind`, its hooks less those that capture log records: it is the ranks that log, and they capture.

    The capture costs more than all else that the driver does for a test (see `let_loggers_propagate`).
    """

    class Redirected(kind):  # type: ignore[valid-type, misc]
        @property
        def ihook(self) -> Any:
            hooks = super().ihook
            # Where a conftest applies to some of the files only, pytest has a relay of its own, which is left alone.
            if hooks is not self.config.hook:
                return hooks
            if _RELAY not in self.config.stash:
                self.config.stash[_RELAY] = _HooksWithoutLogging(self.config)
            return self.config.stash[_RELAY]

    Redirected.__name__, Redirected.__qualname__, Redirected.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    return Redirected
