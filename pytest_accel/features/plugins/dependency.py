"""pytest-dependency: only the driver skips tests, because only the driver knows the outcomes of other tests."""

from __future__ import annotations

from typing import NoReturn

import pytest

from pytest_accel.features.plugins.unknown_releases import WithoutBridge, leave_out, require, take
from pytest_accel.rank.context import RANK

WITHOUT = WithoutBridge(
    "pytest-dependency", "the outcomes of other tests in ranks, where pytest_dependency.depends() needs them"
)

_MODULE = "pytest_dependency"


def plugin(config: pytest.Config) -> None:
    """In a rank, remove the plugin's hooks, and have `pytest_dependency.depends` fail."""
    if RANK in config.stash:
        leave_out(config, _MODULE)
    manager = take(_MODULE, "DependencyManager")
    require(manager, "checkDepend")  # `depends` calls it.
    if RANK in config.stash:
        manager.checkDepend = _refuse


def _refuse(self: object, depends: object, item: pytest.Item) -> NoReturn:
    """Fail a test that calls `pytest_dependency.depends`: a rank does not know the outcomes of other tests."""
    __tracebackhide__ = True
    pytest.fail(
        "pytest_dependency.depends() does not work in a rank, which does not know the outcomes of other tests: "
        f"mark the test with @pytest.mark.dependency(depends={depends!r}) instead",
        pytrace=False,
    )
