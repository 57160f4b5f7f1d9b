"""Calls of the kernel: marks that rules of the ini file add, and tests of torch's harness."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_accel.features.adoption.suite_adoption import Adoption
from pytest_accel.rank.context import RANK
from pytest_accel.settings.options import ADOPT

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession

_PLUGIN = "accel-adoption"


def pytest_accel_configure(session: AccelSession) -> None:
    adoption = Adoption(session.config, lambda: len(session.machine.session.devices))
    session.config.pluginmanager.register(adoption, _PLUGIN)


def pytest_accel_configure_rank(config: pytest.Config) -> None:
    config.pluginmanager.register(Adoption(config, lambda: 0), _PLUGIN)
    if config.getini(ADOPT):
        from pytest_accel.features.adoption.torch_harness import HarnessInRank

        config.pluginmanager.register(HarnessInRank(config.stash[RANK]), "accel-harness")


def pytest_accel_marks_of_file(config: pytest.Config, path: Path, text: str) -> set[str]:
    adoption: Adoption | None = config.pluginmanager.get_plugin(_PLUGIN)
    return set() if adoption is None else adoption.marks_in(path, text)
