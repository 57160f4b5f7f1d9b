"""pytest-order: the driver orders the session's tests, and fails those that it cannot order if that is asked for."""

from __future__ import annotations

from importlib import import_module

import pytest

from pytest_accel.stash import MARKED

_SORTER = "orderingplugin"
"""The name of the object that sorts the tests."""
_FIXTURE = "fail_after_cannot_order"
"""The fixture that the sorter gives to a test which it cannot order (``--error-on-failed-ordering``)."""


def rank_plugin(config: pytest.Config) -> None:
    """Keep the rank from sorting: it knows some files only, and relations to tests of others would count as errors."""
    config.pluginmanager.unregister(name=_SORTER)


def driver_plugin(config: pytest.Config) -> object | None:
    """Return what fails tests in the place of the fixture, which is set up in no process."""
    if not (config.pluginmanager.has_plugin(_SORTER) and hasattr(import_module("pytest_order.plugin"), _FIXTURE)):
        raise pytest.UsageError(
            f"pytest-order: this release has no {_SORTER} or {_FIXTURE}, and cannot order marked tests; "
            "use pytest-order 1.5, or leave it out with -p no:pytest_order"
        )
    return _FailUnordered() if config.getoption("error_on_failed_ordering") else None


class _FailUnordered:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if MARKED in item.stash and _FIXTURE in getattr(item, "fixturenames", ()):
            pytest.fail("The test could not be ordered", pytrace=False)
