"""pytest-isolate: it forks the driver, and its limits hold for that fork. Refused for marked tests."""

from __future__ import annotations

import pytest

from pytest_accel.stash import MARKED, SESSION


def driver_plugin(config: pytest.Config) -> object | None:
    # The plugin itself does nothing then.
    plugins = config.pluginmanager
    if config.getoption("noisolate") or plugins.has_plugin("forked") or plugins.has_plugin("timeout"):
        return None
    return _Driver()


class _Driver:
    @pytest.hookimpl(tryfirst=True)  # Before xdist tells the main process that this worker has collected.
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        from pytest_isolate.plugin import get_isolation_options

        for item in session.items:
            if MARKED in item.stash and any(asked not in (None, False, {}) for asked in get_isolation_options(item)):
                session.config.stash[SESSION].port.usage_error(
                    f"{item.nodeid}: pytest-isolate runs a test in a fork of the pytest process, and limits that fork; "
                    "the ranks of a marked test are out of its reach. Run marked tests with --no-isolate; `fresh=True` "
                    "gives a test new processes, and `timeout=` limits its time"
                )
