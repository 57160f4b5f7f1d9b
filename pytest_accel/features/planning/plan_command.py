"""``--accel-plan``: collect the suite, run no test, and show how the tests would be scheduled on a machine."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.marks import MarkFinder
from pytest_accel.core.stash_keys import OWNERS
from pytest_accel.driver.items import marked_of
from pytest_accel.features.order.stored_durations import recall
from pytest_accel.features.planning import plan_text
from pytest_accel.features.planning.forecast import Forecast, SuiteOnMachine, best
from pytest_accel.features.planning.plan_text import Jobs
from pytest_accel.features.planning.selection import Planned, divide, runnable, skip_reason, suite_of
from pytest_accel.hardware.hypothetical_machine import PretendedMachine
from pytest_accel.item_redirection import Redirector
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.hardware.inventory import Machine
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
        config = self._session.config
        planned = [(item, None if (marked := marked_of(item)) is None else marked.plan) for item in items]
        reasons = [skip_reason(item, plan) for item, plan in planned]
        skipped = Counter(reason for reason in reasons if reason is not None)
        yield from plan_text.plain(plan_text.count_tests(reasons.count(None), skipped.most_common()))
        if None not in reasons:
            return
        target = _Target.of("this one", planned, config, self._session.machine)
        suite = target.suite
        yield from plan_text.plain(plan_text.about_times(suite.times))
        if options.planned_machine(config) is not None:
            yield "requirements for memory, capability and name are assumed to be met", False
        forecasts = list(suite.forecasts())
        chosen = best(forecasts)
        requested = getattr(config.option, "numprocesses", None)
        if requested:
            chosen = next((one for one in forecasts if one.workers == requested), None) or suite.forecast(requested)
            forecasts = sorted({one.workers: one for one in (*forecasts, chosen)}.values(), key=lambda one: one.workers)
        yield from plan_text.table(forecasts, suite.devices)
        yield from plan_text.plain(plan_text.about(chosen, suite, shutil.get_terminal_size().columns))
        shard = self._session.settings.shard
        if shard is not None:
            yield from plan_text.parts(target.parts(shard[1], chosen.workers))
        request = options.plan_request(config)
        if request is not None and (limit := request.within) is not None:
            targets = list(self._pretended(planned)) or [target]
            yield from plan_text.jobs([one.jobs(limit, requested) for one in targets], limit)

    def _pretended(self, planned: Planned) -> Iterator[_Target]:
        """Yield the machine of ``--accel-plan KIND:N``, and those with half of its devices, a quarter and so on."""
        config = self._session.config
        kind, count = options.planned_machine(config) or ("", 0)
        while count >= 1:
            machine = PretendedMachine(count, kind, self._session.machine.resources)
            redirector, finder = Redirector(self._session, machine), MarkFinder(config.stash[OWNERS])
            these = [
                (item, None if plan is None else redirector.plan(item, finder.find(item))) for item, plan in planned
            ]
            yield _Target.of(f"{kind}:{count}", these, config, machine)
            count //= 2


@dataclass(frozen=True, slots=True)
class _Target:
    """A machine, and the tests as they are planned for it."""

    name: str
    machine: Machine
    planned: Planned
    suite: SuiteOnMachine
    """The tests that can run on the machine."""
    config: pytest.Config

    @classmethod
    def of(cls, name: str, planned: Planned, config: pytest.Config, machine: Machine) -> _Target:
        return cls(name, machine, planned, suite_of(planned, recall(config), machine), config)

    def parts(self, parts: int, workers: int) -> list[Forecast]:
        """Return the session of each of `parts` jobs."""
        numbers = {item: number for number, (item, _) in enumerate(runnable(self.planned))}
        return [
            self.suite.part([numbers[item] for item in part if item in numbers]).forecast(workers)
            for part in divide(self.planned, self.config, self.machine, parts, workers)
        ]

    def jobs(self, limit: float, workers: int | None) -> Jobs:
        """Return the smallest number of jobs that end within `limit` seconds, each with `workers` (None: the best)."""
        suite = self.suite
        workers = workers or (best(list(suite.forecasts())).workers if suite.collection else 1)
        longest, nodeid = max(zip(suite.times.seconds, suite.collection, strict=True), default=(0.0, ""))
        parts = max(1, math.ceil(suite.lower_bound / limit))
        while longest <= limit and parts <= len(suite.collection):
            forecasts = self.parts(parts, workers)
            slowest = max(forecast.makespan for forecast in forecasts)
            if slowest <= limit:
                return Jobs(self.name, len(suite.collection), workers, forecasts)
            parts = max(parts + 1, int(parts * slowest / limit))
        return Jobs(self.name, len(suite.collection), workers, [], nodeid)
