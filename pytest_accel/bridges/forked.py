"""pytest-forked: a marked test runs in processes of its own as it is, so the driver is not forked for it.

Such a test has a fresh world (`pytest_accel.session`).
"""

from __future__ import annotations

import pytest

from pytest_accel.stash import MARKED


def driver_plugin(config: pytest.Config) -> object:
    import pytest_forked

    config.pluginmanager.unregister(pytest_forked)
    return _Driver()


class _Driver:
    """Stands in for the plugin, all of whose other hooks have been called by now."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        import pytest_forked

        return None if MARKED in item.stash else pytest_forked.pytest_runtest_protocol(item, nextitem)
