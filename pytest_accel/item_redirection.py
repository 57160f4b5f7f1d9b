"""Redirection of marked items: each gets a plan, and runs in a world. Imported when the first marked item is found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pytest_accel import features
from pytest_accel.core.marks import MarkError, Marks, own_world_size
from pytest_accel.core.node_refs import give_new_stash
from pytest_accel.core.stash_keys import DRIVER_LEASES, MARKED, VARIANT
from pytest_accel.core.world_key import Needs
from pytest_accel.driver.item_plan import ItemPlan, Resources, needs_of, plan_item
from pytest_accel.driver.items import MarkedItem
from pytest_accel.hardware.registry import VendorError
from pytest_accel.settings.options import planned_machine
from pytest_accel.verdict import phase_verdict

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession


class Redirector:
    """Makes the marked items of one process run in worlds, and refuses those whose marks are wrong."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._resources = Resources(
            session.machine,
            session.settings,
            self._why_no_launcher,
            session.launched,
            hypothetical=planned_machine(session.config) is not None,
        )
        self._plans: dict[ItemPlan, ItemPlan] = {}
        """The plans of all items. Thousands of items may have equal plans; these are one object."""

    def redirect(self, items: Sequence[pytest.Item], marked: Iterable[tuple[pytest.Item, Marks]]) -> list[MarkedItem]:
        """Make the items in `marked` run in worlds; return those that were not redirected before.

        `items` are all collected items. A test whose marks are wrong fails, and the session runs the others.
        """
        redirected: list[MarkedItem] = []
        for item, marks in marked:
            existing = item.stash.get(MARKED, None)
            if existing is not None:
                if existing.item is item:
                    continue
                give_new_stash(item)  # A copied item, as pytest-flakefinder makes, shares the original's stash.
            try:
                plan = self.plan(item, marks)
                marked_item = MarkedItem(item, marks, self._plans.setdefault(plan, plan), self._session.driver)
                marked_item.install()
                redirected.append(marked_item)
            except (MarkError, VendorError, pytest.UsageError) as error:
                foreign = getattr(error, "foreign", "")
                hint = "; if the mark is the project's own, register it in markers" if foreign else ""
                make_fail(item, f"{error}{hint}")
        if redirected and self._session.is_worker and self._session.config.option.trace:
            text = "--trace has no terminal where xdist distributes the tests: run them without -n"
            self.refuse(text, [one.item for one in redirected])
        if redirected:
            _leave_collectors_to_ranks(items)
        return redirected

    def refuse(self, text: str, items: Iterable[pytest.Item]) -> None:
        """End the session with the usage error `text`, which describes what is wrong with `items`.

        In an xdist worker, whose session cannot end the controller's, make `items` errors instead.
        """
        if not self._session.is_worker:
            raise pytest.UsageError(text)
        for item in items:
            make_fail(item, text)

    def needs(self, plan: ItemPlan) -> Needs:
        """Return what a test with `plan` needs."""
        return needs_of(plan, self._resources)

    def plan(self, item: pytest.Item, marks: Marks) -> ItemPlan:
        """Return the plan of `item`, which has `marks`. Raise `MarkError` or `VendorError` if `marks` are wrong."""
        chosen, _ = item.stash.get(VARIANT, None) or ({}, None)
        chosen = {"world_size": own_world_size(item), **chosen}
        plan = plan_item(marks, chosen, self._resources)
        leases = item.stash.get(DRIVER_LEASES, None)
        if leases is None:
            return plan
        if plan.key.kind in self._resources.machine.resources:
            # The lease of the world would come after the leases of the driver, and not in the order of all other tests.
            raise MarkError(
                f"@pytest.mark.devices(kind={plan.key.kind!r}) with @pytest.mark.needs: a test can have one of them, "
                f"name {plan.key.kind} in needs, and leave out kind="
            )
        return replace(plan, missing=plan.missing or leases.missing)

    def _why_no_launcher(self, launcher: str) -> str | None:
        """Return why `launcher` cannot be used on this machine; None if it can."""
        features.register(self._session.config, "launcher")
        reason: str | None = self._session.config.hook.pytest_accel_why_no_launcher(launcher=launcher)
        return reason


def _leave_collectors_to_ranks(items: Sequence[pytest.Item]) -> None:
    """Skip the setup of collectors whose tests all run in ranks.

    For example, a package's ``setup_module`` runs in this process only if one of the package's tests does.
    """
    needed = {node for item in items if MARKED not in item.stash for node in item.listchain()}
    for item in items:
        for node in item.listchain()[:-1]:
            if node not in needed:
                node.setup = lambda: None  # type: ignore[method-assign]


def make_fail(item: pytest.Item, text: str) -> None:
    """Make `item` an error with this text, also if it is marked xfail. It is not set up, so it is not torn down."""
    item.setup = partial(_fail_setup, text)  # type: ignore[method-assign]
    item.teardown = lambda: None  # type: ignore[method-assign]


def _fail_setup(text: str) -> None:
    """Raise an error with `text` in place of the setup of a test."""
    raise phase_verdict.not_run(text)
