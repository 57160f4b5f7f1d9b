"""Tests of the plan of a test that takes as many devices or ranks as there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_accel.core.device import Device
from pytest_accel.driver.item_plan import Resources
from pytest_accel.hardware.inventory import Inventory, PretendedMachine
from tests.plans import TWO_NODES, devices, distributed, plan, resources

GIB = 1024**3
MIXED = tuple(Device("cuda", f"GPU-{n}", n, "GPU", memory=(80, 80, 16, 16)[n] * GIB) for n in range(4))
SLICES = tuple(Device("cuda", f"MIG-{n}", n, "MIG", parent="GPU-0") for n in range(3))


def having(found: tuple[Device, ...]) -> Resources:
    """Return the resources of a session with the CUDA devices `found`."""
    machine = PretendedMachine(1, "cuda")
    machine.session = Inventory("cuda", found, present=len(found), visible=len(found))
    return replace(resources("cuda"), machine=machine)


@pytest.mark.parametrize(
    ("decorators", "of", "number"),
    [
        ((devices("all"),), resources(), 8),
        ((devices("all", share=0.25),), resources(), 8),
        ((devices("all", memory="40GiB"),), having(MIXED), 2),
        # A process sees one slice at most.
        ((devices("all"),), having(SLICES), 1),
        ((devices("all"),), having((*SLICES, *MIXED)), 4),
        ((devices("all"),), resources(layout=TWO_NODES), 8),
        ((distributed("all"),), resources(), 8),
        ((distributed("all"),), having((*SLICES, *MIXED)), 4),
        ((distributed("all"), devices(memory="40GiB")), having(MIXED), 2),
        ((distributed("all", devices_per_rank=2),), resources(count=3), 1),
        ((distributed("all"), devices(2)), resources(count=5), 2),
        ((distributed("all", backend="gloo"), devices(share=0.25)), resources(count=2), 8),
        ((distributed("all", backend="nccl"), devices(share=0.25)), resources("cuda", 2), 2),
        # Each rank has two devices, and each device has room for three ranks.
        ((distributed("all", backend="gloo"), devices(2, share=0.3)), resources(count=2), 3),
        ((distributed("all"),), resources(None), 6),
        ((distributed("all", kind="cpu"),), resources(), 6),
        ((distributed("all"),), resources("cpu", 3), 3),
        ((distributed("all", kind="cpu"),), resources(layout=TWO_NODES), 4),
        ((distributed("all"),), resources(layout=TWO_NODES), 4),
        # One machine has one device, and a test that needs no more machines has its ranks on one.
        ((distributed("all"),), resources(count=1, layout=TWO_NODES), 1),
        ((distributed("all", at_least=8),), resources(), 8),
    ],
)
def test_all_is_the_largest_number_that_can_run(
    decorators: tuple[pytest.MarkDecorator, ...], of: Resources, number: int
) -> None:
    found = plan(*decorators, of=of)
    key = found.key
    assert found.missing is None
    assert (key.ranks if key.grouped or key.need is None else key.need.count) == number
