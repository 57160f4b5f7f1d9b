"""The choice of the tests that this session runs: ``--accel-select``, ``--accel-shard``, and ``-m`` for our marks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.marks import MarkError, MarkOwners, Marks, as_keywords
from pytest_accel.core.world_key import Needs
from pytest_accel.driver.item_plan import ItemPlan
from pytest_accel.features.order.stored_durations import recall
from pytest_accel.features.order.tasks import Planned, Task, missing, need_of, tasks_of
from pytest_accel.features.planning.shards import partition
from pytest_accel.hardware.registry import VendorError
from pytest_accel.settings import select_expression

if TYPE_CHECKING:
    from pytest_accel.item_redirection import Redirector
    from pytest_accel.session import AccelSession


def name_arguments(items: Iterable[pytest.Item], owners: MarkOwners) -> None:
    """Give the plugin's marks of `items` their first argument by name: ``-m`` compares only named arguments."""
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers[:] = [as_keywords(mark) if owners.is_ours(mark) else mark for mark in node.own_markers]


def select(
    session: AccelSession,
    items: list[pytest.Item],
    found: dict[pytest.Item, Marks],
    redirector: Redirector,
    shard: tuple[int, int] | None,
) -> None:
    """Deselect the tests that do not meet ``--accel-select``, then those of the other parts than `shard`.

    `shard` is the number of a part and that of all parts; None to keep all parts. `found` has the marks of the marked
    tests. Tests with wrong marks stay: they fail when they are redirected.
    """
    plans: dict[pytest.Item, ItemPlan] = {}
    wrong: set[pytest.Item] = set()
    for item, marks in found.items():
        try:
            plans[item] = redirector.plan(item, marks)
        except (MarkError, VendorError, pytest.UsageError):
            wrong.add(item)
    condition = session.settings.select
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
        divided = _divide(session, [(item, plans.get(item)) for item in items], parts, int(workers or 1))
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


def skip_reason(item: pytest.Item, plan: ItemPlan | None) -> str | None:
    """Return the reason why a test is certain to be skipped; None if it may run."""
    return missing(item, plan) or ("marked skip" if any(item.iter_markers("skip")) else None)


def _divide(session: AccelSession, planned: Planned, parts: int, workers: int) -> list[list[pytest.Item]]:
    """Divide tests into `parts` parts, for jobs that run `workers` tests at the same time. See `shards.py`.

    Only the times in the file of ``--accel-durations`` count: those in pytest's cache differ from job to job. The tests
    that are certain to be skipped are divided, too.
    """
    stored = {} if session.settings.durations is None else recall(session.config)
    needs = [need_of(item, plan, session.machine) for item, plan in planned]
    tasks = tasks_of([item.nodeid for item, _ in planned], needs, stored)
    for number, one in enumerate(planned):
        if skip_reason(*one) is not None:
            tasks[number] = Task(one[0].nodeid, seconds=0.0)
    found = partition(tasks, [_together(item) for item, _ in planned], parts, workers)
    return [[planned[index][0] for index in indices] for indices in found]


def _together(item: pytest.Item) -> str:
    """Return a text that is the same for tests that must run in one job; empty if `item` can run in any.

    Tests of pytest-dependency depend on others of their module; those of an ``xdist_group`` share what they set up.
    """
    if item.get_closest_marker("dependency") is not None:
        return item.nodeid.partition("::")[0]
    group = item.get_closest_marker("xdist_group")
    return "" if group is None else f"xdist_group {group.args} {group.kwargs}"
