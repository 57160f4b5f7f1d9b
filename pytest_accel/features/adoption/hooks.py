"""Calls of the kernel: marks that rules of the ini file add, and tests of torch's harness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core.marks import compares_arguments
from pytest_accel.features.adoption import suite_adoption
from pytest_accel.rank.context import RANK

if TYPE_CHECKING:
    from pytest_accel.features.adoption.suite_adoption import Adoption
    from pytest_accel.session import AccelSession

_PLUGIN = "accel-adoption"


def pytest_accel_configure(session: AccelSession) -> None:
    _register(session.config, lambda: len(session.machine.session.devices))


def pytest_accel_configure_rank(config: pytest.Config) -> None:
    from pytest_accel.features.adoption.torch_harness import HarnessInRank

    harness = HarnessInRank(config.stash[RANK])
    if _register(config, lambda: 0, harness.install):
        config.pluginmanager.register(harness, "accel-harness")


def pytest_accel_marks_of_file(config: pytest.Config, path: Path, text: str) -> set[str]:
    adoption: Adoption | None = config.pluginmanager.get_plugin(_PLUGIN)
    return set() if adoption is None else adoption.marks_in(path, text)


def _register(
    config: pytest.Config, capacity: Callable[[], int], on_harness: Callable[[Any], None] | None = None
) -> bool:
    """Register the plugin that adds marks to tests, if the ini file asks for it; return whether it does.

    `capacity` and `on_harness` are those of :class:`Adoption`.
    """
    by_name = compares_arguments(getattr(config.option, "markexpr", ""))
    adoption = suite_adoption.make(config, capacity, on_harness, by_name=by_name)
    if adoption is not None:
        config.pluginmanager.register(adoption, _PLUGIN)
    return adoption is not None
