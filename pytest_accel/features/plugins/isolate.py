"""pytest-isolate: refused for marked tests, because it forks the driver and limits only that fork."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_accel.core.stash_keys import MARKED, SESSION
from pytest_accel.features.plugins.internals import require, take


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that refuses marked tests that are to be isolated; None if pytest-isolate is off."""
    require(config.option, "noisolate")
    options_of = take("pytest_isolate.plugin", "get_isolation_options")
    plugins = config.pluginmanager
    # pytest-isolate turns itself off next to these two plugins.
    if config.option.noisolate or plugins.has_plugin("forked") or plugins.has_plugin("timeout"):
        return None
    return _InDriver(options_of)


class _InDriver:
    def __init__(self, options_of: Callable[[pytest.Item], tuple[object, ...]]) -> None:
        self._options_of = options_of

    @pytest.hookimpl(tryfirst=True)  # Before xdist reports to the main process that collection has finished.
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            # None, False and an empty dict mean that an option is not set.
            if MARKED in item.stash and any(asked not in (None, False, {}) for asked in self._options_of(item)):
                session.config.stash[SESSION].pool_client.usage_error(
                    f"{item.nodeid}: pytest-isolate runs a test in a fork of the pytest process, and limits that fork; "
                    "it cannot isolate the ranks of a marked test. Run marked tests with --no-isolate; `fresh=True` "
                    "gives a test new processes, and `timeout=` limits its time"
                )
