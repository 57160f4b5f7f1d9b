"""Redirection of marked items: each gets a plan, and runs in a world. Imported when the first marked item is found.

The hooks of the driver while tests run are here, too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel import features
from pytest_accel.core.marks import MarkError, Marks, own_world_size
from pytest_accel.core.node_refs import give_new_stash
from pytest_accel.core.stash_keys import DRIVER_LEASES, MARKED, VARIANT
from pytest_accel.core.world_key import Needs, WorldKey
from pytest_accel.driver.item_plan import ItemPlan, Resources, needs_of, plan_item
from pytest_accel.driver.items import MarkedItem, marked_of
from pytest_accel.hardware.registry import VendorError
from pytest_accel.settings.options import planned_machine
from pytest_accel.verdict import phase_verdict

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession


class Redirector:
    """Makes the marked items of one process run in worlds, and refuses those whose marks are wrong.

    Registered as a plugin once there are marked items to run. Then its hooks get a world for each of them, apply the
    time limits of pytest-timeout to it, and complete its reports.
    """

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

    # Hooks, called while tests run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if not self._session.is_worker:
            _link(session.items)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        marked = marked_of(item)
        if marked is None:
            return (yield)
        if self._session.is_forked_copy:
            text = "a process that a test forked has returned from the test; only the original process has ranks"
            pytest.exit(text, returncode=1)
        following = marked_of(nextitem) if nextitem is not None else None
        if self._session.is_worker:
            # A worker knows only its next test; another worker may use the world before a later test.
            same_key = following is not None and following.missing is None and following.key == marked.key
            marked.following = following if same_key and not marked.key.fresh else None
            marked.last = marked.key.fresh
        try:
            if not any(item.iter_markers("skip")):
                self._session.driver.prepare(marked)
            return (yield)
        except KeyboardInterrupt:
            # The ranks may run the test although the driver was not waiting for them.
            if not self._session.is_forked_copy:
                self._session.driver.interrupt()
            raise
        finally:
            # Another worker may get the test of a hint, and then needs the world: give it back to the pool, where it
            # stays warm. Its ranks keep the fixtures of that test.
            self._session.driver.after(None if self._session.next_is_hint else following)
            marked.forget_run()
            vars(marked).pop("node", None)  # A session may have 20,000 tests.
            vars(item).pop("ihook", None)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Apply pytest-timeout's limit to a marked item without its timer, which would interrupt or kill the driver."""
        marked = marked_of(item)
        if marked is None:
            return None
        marked.limits.limit_test(settings.timeout)
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        marked = marked_of(item)
        if marked is None:
            return None
        marked.limits.limit_test(None)
        return True

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the ranks' merged report in place of a marked item's own, before any other plugin sees it."""
        report = yield
        marked = marked_of(item)
        if marked is not None:
            marked.complete_report(report, call)
        return report

    @pytest.hookimpl(wrapper=True, specname="pytest_runtest_makereport")
    def pytest_conclude_report(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        marked = marked_of(item)
        if marked is not None:
            marked.conclude_report(report)
        return report


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


def _link(items: list[pytest.Item]) -> None:
    """Set `following` of each test to the next test of the same key, and `last` if there is none."""
    later: dict[WorldKey, MarkedItem] = {}
    for item in reversed(items):
        marked = marked_of(item)
        if marked is None or marked.missing is not None:
            continue
        marked.following = None if marked.key.fresh else later.get(marked.key)
        marked.last = marked.following is None
        later[marked.key] = marked
