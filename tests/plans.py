"""Plans of tests, made of their marks and of the resources of a session."""

from __future__ import annotations

import pytest

from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.core.marks import Marks
from pytest_accel.driver.item_plan import ItemPlan, Resources, plan_item
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.machines_starter import Layout
from pytest_accel.hardware.inventory import Machine, PretendedMachine
from pytest_accel.settings.options import Settings

devices, distributed = pytest.mark.devices, pytest.mark.distributed
TWO_NODES = Layout(
    LauncherEnv("torchrun", 0, 4, 0, 2, ()),
    [Hello(rank, 1, host=name, machine=name) for rank, name in enumerate(("one", "one", "two", "two"))],
)


def resources(
    kind: str | None = "sim",
    count: int = 8,
    settings: Settings = Settings(),  # noqa: B008 - immutable.
    *,
    layout: Layout | None = None,
    launcher_missing: str | None = None,
    hypothetical: bool = False,
) -> Resources:
    """Return the resources of a session with `count` devices of `kind`, or without an accelerator if `kind` is None."""
    machine = PretendedMachine(count, kind) if kind else Machine("none")
    machine.slots = 6
    return Resources(
        machine,
        settings,
        lambda launcher: launcher_missing,
        layout,
        hypothetical,
    )


def marks(*decorators: pytest.MarkDecorator) -> Marks:
    """Return the marks of a test that has `decorators`."""
    return Marks(**{decorator.name: decorator.mark for decorator in decorators})


def plan(*decorators: pytest.MarkDecorator, of: Resources | None = None) -> ItemPlan:
    """Return the plan of a test with `decorators` in a session with the resources `of`."""
    return plan_item(marks(*decorators), {}, of or resources())
