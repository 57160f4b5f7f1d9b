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

_ADOPTION: pytest.StashKey[Adoption] = pytest.StashKey()


def configure(session: AccelSession) -> None:
    if (adoption := _make(session.config, lambda: len(session.machine.session.devices))) is not None:
        session.config.pluginmanager.register(adoption, "accel-adoption")


def configure_rank(config: pytest.Config) -> None:
    from pytest_accel.features.adoption.torch_harness import HarnessInRank

    harness = HarnessInRank(config.stash[RANK])
    if (adoption := _make(config, lambda: 0, harness.install)) is not None:
        config.pluginmanager.register(harness, "accel-harness")
        config.pluginmanager.register(adoption, "accel-adoption")


def marks_of_file(config: pytest.Config, path: Path, text: str) -> set[str]:
    adoption = config.stash.get(_ADOPTION, None)
    return set() if adoption is None else adoption.marks_in(path, text)


def _make(
    config: pytest.Config, capacity: Callable[[], int], on_harness: Callable[[Any], None] | None = None
) -> Adoption | None:
    """Return the plugin that adds marks to tests; `capacity` and `on_harness` are those of `suite_adoption.make`."""
    by_name = compares_arguments(getattr(config.option, "markexpr", ""))
    adoption = suite_adoption.make(config, capacity, on_harness, by_name=by_name)
    if adoption is not None:
        config.stash[_ADOPTION] = adoption
    return adoption
