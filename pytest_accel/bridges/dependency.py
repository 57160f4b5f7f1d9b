"""pytest-dependency: the driver, which has seen how all tests ended, judges; ranks do not."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest


def rank_plugin(config: pytest.Config) -> None:
    import pytest_dependency

    config.pluginmanager.unregister(pytest_dependency)
    manager: Any = pytest_dependency.DependencyManager
    manager.checkDepend = _refuse


def _refuse(self: object, depends: object, item: pytest.Item) -> NoReturn:
    """Fail a test that calls `pytest_dependency.depends`: a rank does not know how other tests ended."""
    __tracebackhide__ = True
    pytest.fail(
        "pytest_dependency.depends() does not work in a rank, which does not know how other tests ended: "
        f"mark the test with @pytest.mark.dependency(depends={depends!r}) instead",
        pytrace=False,
    )
