"""A test with marks of the plugin, as the driver knows it before the test runs."""

from __future__ import annotations

from functools import cached_property

import pytest

from pytest_accel.core.rank_messages import NodeRef
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import ItemPlan
from pytest_accel.rank.collector import names_of

_CONDITIONS = ("skip", "skipif", "xfail", "dependency", "order", "flaky")
"""Marks that may keep a test from running, or have it run again. `dependency` is pytest-dependency's, `order` is
pytest-order's."""


class MarkedTest:
    """A test with marks: its plan, and its place in the order of tests."""

    def __init__(self, item: pytest.Item, plan: ItemPlan) -> None:
        self.item = item
        self.plan = plan
        self.following: MarkedTest | None = None
        """The next test that uses a world of the same key, as far as the order is known."""
        self.last = False
        """True if, as far as known, no other test follows in the world."""

    @property
    def key(self) -> WorldKey:
        """Key of the world in which the test runs."""
        return self.plan.key

    @property
    def missing(self) -> str | None:
        """Reason why the test cannot run on this machine; None if it can."""
        return self.plan.missing

    @property
    def node(self) -> NodeRef:
        return NodeRef(str(self.item.path), names_of(self.item))

    @property
    def place(self) -> tuple[str, int]:
        """File and line of the test."""
        path, line, _ = self.item.location
        return path, (line or 0) + 1

    @property
    def is_sure_to_run(self) -> bool:
        """True if, as far as known, pytest will ask for all phases of the test."""
        session = self.item.session
        return self.missing is None and not session.shouldstop and not session.shouldfail and self._is_unconditional

    @cached_property
    def _is_unconditional(self) -> bool:
        """True if no mark makes the run of the test conditional. Evaluated when tests run: all marks are known then.

        The option ``--force-flaky`` counts as a mark `flaky` on each test.
        """
        if getattr(self.item.config.option, "force_flaky", False):
            return False
        return not any(mark.name in _CONDITIONS for mark in self.item.iter_markers())
