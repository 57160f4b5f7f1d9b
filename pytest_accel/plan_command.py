"""``--accel-plan``: collect the suite, run no test, and show how the tests would be scheduled on a machine."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_accel.driver.items import marked_of
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.schedule.forecast import Suite
    from pytest_accel.session import AccelSession


class PlanHooks:
    """Hooks of ``--accel-plan``, registered in the process that has the terminal."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Show the plan instead of the list of tests that pytest shows with ``--collect-only``."""
        items, session.items = session.items, []
        try:
            result = yield
        finally:
            session.items = items
        if items and (not session.testsfailed or session.config.option.continue_on_collection_errors):
            from pytest_accel.core.terminal_lines import write_section

            write_section(session.config, "accel: plan", self._lines(items))
        return result

    def _lines(self, items: Sequence[pytest.Item]) -> Iterator[tuple[str, bool]]:
        """Return the lines of the plan, each with True if it is highlighted."""
        from pytest_accel.schedule import plan_text
        from pytest_accel.schedule.forecast import best

        config = self._session.config
        reasons = {item: _skip_reason(item) for item in items}
        tests = [item for item in items if reasons[item] is None]
        skipped = Counter(reason for reason in reasons.values() if reason is not None)
        yield from plan_text.plain(plan_text.census(len(tests), skipped.most_common()))
        if not tests:
            return
        suite = self._suite(tests)
        yield from plan_text.plain(plan_text.about_times(suite.times))
        if options.planned_machine(config) is not None:
            yield "requirements for memory, capability and name are assumed to be met", False
        plays = list(suite.plays())
        chosen = best(plays)
        requested = getattr(config.option, "numprocesses", None)
        if requested:
            chosen = next((play for play in plays if play.workers == requested), None) or suite.play(requested)
            plays = sorted({play.workers: play for play in (*plays, chosen)}.values(), key=lambda play: play.workers)
        yield from plan_text.table(plays, suite.devices)
        yield from plan_text.plain(plan_text.about(chosen, suite, shutil.get_terminal_size().columns))

    def _suite(self, tests: Sequence[pytest.Item]) -> Suite:
        from pytest_accel.hardware.vendors.cpu import cpu_slots
        from pytest_accel.schedule.forecast import Suite, times
        from pytest_accel.schedule.history import recall
        from pytest_accel.schedule.test_demand import Demand

        session = self._session
        items = ((index, marked_of(item)) for index, item in enumerate(tests))
        demand = Demand.of((index, marked.key) for index, marked in items if marked is not None)
        node_ids = [item.nodeid for item in tests]
        kinds = demand.kinds_of_tests(len(node_ids))
        test_times = times(recall(session.config), list(zip(node_ids, kinds, strict=True)))
        return Suite(node_ids, demand, test_times, session.machine, cpu_slots())


def _skip_reason(item: pytest.Item) -> str | None:
    """Return the reason why a test is certain to be skipped; None if it may run."""
    marked = marked_of(item)
    if marked is not None and marked.missing is not None:
        return marked.missing
    return "marked skip" if any(item.iter_markers("skip")) else None
