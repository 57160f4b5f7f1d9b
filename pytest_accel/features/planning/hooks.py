"""Calls of the kernel: the choice of tests, and the plan."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.marks import MarkError, Marks, as_keywords
from pytest_accel.core.stash_keys import OWNERS
from pytest_accel.core.world_key import Needs
from pytest_accel.driver.item_plan import ItemPlan
from pytest_accel.features import compares_arguments
from pytest_accel.features.order.tasks import missing
from pytest_accel.features.planning.division import divide
from pytest_accel.hardware.registry import VendorError
from pytest_accel.settings import options, select_expression

if TYPE_CHECKING:
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the plugin's marks their first argument by name, if ``-m`` compares arguments: it knows only named ones."""
    if compares_arguments(config):
        owners = config.stash[OWNERS]
        for node in {node for item in items for node in item.listchain()}:
            node.own_markers[:] = [as_keywords(mark) if owners.is_ours(mark) else mark for mark in node.own_markers]


def pytest_accel_select(
    session: AccelSession,
    items: list[pytest.Item],
    found: dict[pytest.Item, Marks],
    redirector: Redirector,
    shard: tuple[int, int] | None,
) -> None:
    """Deselect the tests that do not meet ``--accel-select``, then those of the other parts than `shard`.

    Tests with wrong marks stay: they fail when they are redirected.
    """
    condition = session.settings.select
    if shard is None and condition is None:
        return
    plans: dict[pytest.Item, ItemPlan] = {}
    wrong: set[pytest.Item] = set()
    for item, marks in found.items():
        try:
            plans[item] = redirector.plan(item, marks)
        except (MarkError, VendorError, pytest.UsageError):
            wrong.add(item)
    if condition is not None:
        meets = select_expression.parse(condition)
        needs = {item: redirector.needs(plan) for item, plan in plans.items()}
        chosen = {item for item in items if meets(needs.get(item) or Needs(fits=missing(item, None) is None))}
        _deselect(session.config, items, chosen | wrong)
    if shard is not None:
        part, parts = shard
        given = session.worker_input
        # A plan divides as the jobs do, which have this number of workers.
        workers = getattr(session.config.option, "numprocesses", None) if given is None else given["workercount"]
        divided = divide(session, [(item, plans.get(item)) for item in items], parts, int(workers or 1))
        # The id differs between jobs if they divide the tests in different ways.
        lines = sorted(f"{number} {item.nodeid}" for number, tests in enumerate(divided) for item in tests)
        name = hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()[:6]
        line = f"accel: part {part} of {parts}: {len(divided[part - 1])} of {len(items)} tests, division {name}"
        _deselect(session.config, items, set(divided[part - 1]))
        if given is None:
            session.show(line)
        elif given["workerid"] == "gw0":
            session.pool_client.show(line)


def _deselect(config: pytest.Config, items: list[pytest.Item], chosen: set[pytest.Item]) -> None:
    """Remove the tests that are not `chosen` from `items`, and tell pytest so."""
    removed = [item for item in items if item not in chosen]
    if removed:
        items[:] = [item for item in items if item in chosen]
        config.hook.pytest_deselected(items=removed)
