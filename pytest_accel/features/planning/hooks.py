"""Calls of the kernel: the choice of tests, and the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.core.marks import Marks
    from pytest_accel.item_redirection import Redirector
    from pytest_accel.session import AccelSession

_PARTITIONS = ("splits", "num_shards", "test-group-count")
"""Options by which other plugins run one of several parts of the tests, as argparse's `dest`."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Have a session with ``--accel-plan`` only collect tests. xdist then starts no workers."""
    if options.plans(config):
        config.option.collectonly = True


def pytest_accel_configure(session: AccelSession) -> None:
    config, shard = session.config, session.settings.shard
    for name in _PARTITIONS:
        parts = getattr(config.option, name, None)
        if shard is not None and isinstance(parts, int) and parts > 1:  # Some tests would run in no session.
            both = f"{'{}/{}'.format(*shard)} cannot be used with --{name.replace('_', '-')} {parts}"
            raise pytest.UsageError(f"--accel-shard {both}: each runs a part of the tests; leave one out")
    if not session.is_worker and options.plans(config):
        from pytest_accel.features.planning.plan import PlanHooks

        config.pluginmanager.register(PlanHooks(session), "accel-plan")


def pytest_accel_select(
    session: AccelSession,
    items: list[pytest.Item],
    found: dict[pytest.Item, Marks],
    redirector: Redirector,
    shard: tuple[int, int] | None,
) -> None:
    if shard is not None or session.settings.select is not None:
        from pytest_accel.features.planning import selection

        selection.select(session, items, found, redirector, shard)
