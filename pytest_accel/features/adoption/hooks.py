"""Calls of the kernel: add marks to tests, run tests of torch's harness in ranks, and start spawned processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.features.adoption.suite_adoption import Adoption
from pytest_accel.rank.context import RANK

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession

_PLUGIN = "accel-adoption"


def pytest_accel_configure(session: AccelSession) -> None:
    _register(session.config, session)


def pytest_accel_configure_rank(config: pytest.Config) -> None:
    _register(config, None)


def _register(config: pytest.Config, session: AccelSession | None) -> None:
    """Register the plugins of the feature; `session` is None in a rank."""
    adoption = Adoption(config, None if session is None else lambda: len(session.machine.session.devices))
    config.pluginmanager.register(adoption, _PLUGIN)
    if adoption.harness and session is None:
        from pytest_accel.features.adoption.torch_harness import HarnessInRank

        config.pluginmanager.register(HarnessInRank(config.stash[RANK]))
    if adoption.spawn:
        from pytest_accel.features.adoption.spawned_processes import Spawning

        config.pluginmanager.register(Spawning(config, session))


def pytest_accel_marks_of_file(config: pytest.Config, path: Path, text: str) -> set[str]:
    adoption: Any = config.pluginmanager.get_plugin(_PLUGIN)
    return set(adoption.marks_in(path, text))
