"""Calls of the kernel: the choice of tests, and the plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.stash_keys import OWNERS
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.core.marks import Marks
    from pytest_accel.item_redirection import Redirector
    from pytest_accel.session import AccelSession

_PARTITIONS = (("--splits", "splits"), ("--num-shards", "num_shards"), ("--test-group-count", "test-group-count"))
"""Options by which pytest-split, pytest-shard and pytest-test-groups run one of several parts of the tests: the option,
and argparse's `dest`."""


def start(early_config: pytest.Config, args: list[str]) -> None:
    early_config.pluginmanager.register(_CollectOnly(), "accel-collect-only")


def configure(session: AccelSession) -> None:
    config = session.config
    if session.settings.shard is not None:
        _refuse_second_partition(config, "--accel-shard {}/{}".format(*session.settings.shard))
    if not session.is_worker and options.plans(config):
        from pytest_accel.features.planning.plan import PlanHooks

        config.pluginmanager.register(PlanHooks(session), "accel-plan")


def collected(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    from pytest_accel.features.planning.selection import name_arguments

    name_arguments(items, config.stash[OWNERS])


def select(
    session: AccelSession,
    items: list[pytest.Item],
    found: dict[pytest.Item, Marks],
    redirector: Redirector,
    shard: tuple[int, int] | None,
) -> None:
    from pytest_accel.features.planning import selection

    selection.select(session, items, found, redirector, shard)


class _CollectOnly:
    """Has a session with ``--accel-plan`` only collect tests. xdist then starts no workers."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        config.option.collectonly = True


def _refuse_second_partition(config: pytest.Config, option: str) -> None:
    """Raise ``pytest.UsageError`` if another plugin partitions the tests, too: some of them would run in no session."""
    for other, name in _PARTITIONS:
        parts = getattr(config.option, name, None)
        if isinstance(parts, int) and parts > 1:
            raise pytest.UsageError(
                f"{option} cannot be used with {other} {parts}: each runs a part of the tests; leave one out"
            )
