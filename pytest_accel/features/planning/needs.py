"""The needs of a test, in the words of ``--accel-select``."""

from __future__ import annotations

from typing import NamedTuple

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.world_key import backend_names
from pytest_accel.driver.item_plan import ItemPlan, Resources
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.hardware.shares import fraction


class Needs(NamedTuple):
    """The needs of one test in this session. The defaults are those of a test without marks."""

    marked: bool = False
    """True if the test has the mark ``devices`` or ``distributed``."""
    fits: bool = True
    """True if this machine has all that the test needs."""
    devices: int = 0
    """Number of accelerators that all ranks of the test use together; a shared device counts for each rank."""
    world_size: int = 1
    """Number of processes that run the test; 1 for a rank of a fake process group."""
    nodes: int = 1
    """Minimum number of machines."""
    ranks_per_node: int = 1
    """Number of ranks on the machine with the most of them, if they are on `nodes` machines."""
    kind: str = "none"
    """Kind of the devices; ``cpu`` for ranks without accelerators; ``none`` for a test that names no kind, in a session
    without devices, and for a test without marks."""
    memory: int = 0
    """Bytes that each device must have; 0 if the marks do not say."""
    backend: tuple[str, ...] = ()
    """Names of the backends of the default process group; none if the plugin does not create the group."""
    share: float = 1.0
    """Fraction of each device that the test takes; 1.0 for whole devices."""


def needs_of(plan: ItemPlan, resources: Resources) -> Needs:
    """Return what a test with `plan` needs."""
    key = plan.key
    need = key.need
    vendor_backend = None if key.kind == "none" else resources.machine.vendor(key.kind).backend
    return Needs(
        marked=True,
        fits=plan.missing is None,
        devices=0 if need is None else need.count,
        world_size=key.ranks,
        nodes=key.machines,
        ranks_per_node=-(-key.ranks // key.machines),
        kind=key.kind,
        memory=0 if need is None else need.memory or 0,
        backend=tuple(backend_names(key.backend or vendor_backend)) if key.grouped and key.init else (),
        share=_share_of(need, resources.inventory(key.kind)),
    )


def _share_of(need: DeviceNeed | None, inventory: Inventory) -> float:
    """Return the fraction of a device that `need` takes; of the smallest device if it takes an amount of memory."""
    if need is None or need.share is None:
        return 1.0
    return need.share.fraction or max((fraction(need.share, device) for device in inventory.devices), default=1.0)
