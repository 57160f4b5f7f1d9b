"""A test with marks of the plugin, as the driver knows it before the test runs."""

from __future__ import annotations

from functools import cached_property

import pytest

from pytest_accel.core.marks import Marks
from pytest_accel.core.node_refs import NodeRef, reference
from pytest_accel.core.source_files import recorded_digest
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import ItemPlan


class MarkedTest:
    """A test with marks: its plan, and its place in the order of tests."""

    def __init__(self, item: pytest.Item, marks: Marks, plan: ItemPlan) -> None:
        """`plan` was made from `marks`."""
        self.item = item
        self.marks = marks
        self.plan = plan
        self.digest = recorded_digest(item)
        """Digest of the test's file when this process has collected it."""
        self.expects_failure = True
        """False if the ranks have said that no mark xfail of the test applies there."""
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
        """Reason why the test cannot run on this machine, or None if it can."""
        return self.plan.missing

    @cached_property
    def node(self) -> NodeRef:
        """The reference to the test. The driver needs it three times: for the test before, and twice for this one."""
        return reference(self.item)

    @property
    def place(self) -> tuple[str, int]:
        """File and line of the test."""
        path, line, _ = self.item.location
        return path, (line or 0) + 1
