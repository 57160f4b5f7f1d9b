"""pytest-order: the driver sorts the tests, and fails those that it cannot order (``--error-on-failed-ordering``)."""

from __future__ import annotations

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins.refusals import given
from pytest_accel.features.plugins.unknown_releases import WithoutBridge, leave_out, take
from pytest_accel.rank.context import RANK

WITHOUT = WithoutBridge(
    "pytest-order",
    damage="marked tests that cannot be ordered would pass",
    applies=given("--error-on-failed-ordering"),
)

_FIXTURE = "fail_after_cannot_order"
"""The fixture that pytest-order adds to a test which it cannot order (``--error-on-failed-ordering``)."""


def plugin(config: pytest.Config) -> object | None:
    """Keep a rank from sorting: it collects only some files, so that relations to tests in others would be errors.

    In the driver, return the plugin that fails unordered tests in place of the fixture, which no process sets up; None
    without ``--error-on-failed-ordering``.
    """
    if RANK in config.stash:
        leave_out(config, "pytest_order", "pytest_collection_modifyitems")
        return None
    if not config.getoption("--error-on-failed-ordering"):
        return None
    take("pytest_order.plugin", _FIXTURE)
    return _FailUnordered()


class _FailUnordered:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if MARKED in item.stash and _FIXTURE in getattr(item, "fixturenames", ()):
            pytest.fail("The test could not be ordered", pytrace=False)
