"""A marked test as the driver knows it before it runs: its plan, made from its marks and the session's resources.

The functions are pure: all I/O is in `Resources`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import pytest

from pytest_accel.core import marks
from pytest_accel.core.device import DeviceNeed, Share
from pytest_accel.core.kinds import KINDS_OF_BACKEND
from pytest_accel.core.marks import Marks
from pytest_accel.core.node_refs import NodeRef, reference
from pytest_accel.core.source_files import recorded_digest
from pytest_accel.core.world_key import Needs, WorldKey, backend_names
from pytest_accel.hardware.inventory import Inventory, Machine, without_figures
from pytest_accel.hardware.matching import shortfall
from pytest_accel.hardware.shares import WHOLE, fraction, parts
from pytest_accel.settings.option_types import parse_share
from pytest_accel.settings.options import Settings

_SHARING_BACKENDS = {"gloo", "mpi"}
_OF_FAKE_GROUP = {"nodes": 1, "kind": "cpu", "devices_per_rank": 1, "visible": "world", "launcher": None}
"""Arguments of ``distributed`` and the only value that each may have with ``backend="fake"``."""


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """Decisions about one marked test at its collection."""

    key: WorldKey
    """Key of the world in which the test runs."""
    timeout: float | None = None
    """Timeout of each phase in seconds, or None for the session's timeout."""
    missing: str | None = None
    """Reason to skip the test, because this session can never run it; None if it can run."""
    devices: int | None = None
    """Number of the session's devices of the test's kind, or else of the session's kind; None if there is no kind."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a session, and the functions that look up the rest."""

    machine: Machine
    settings: Settings
    launcher_missing: Callable[[str], str | None]
    """Returns why a launcher cannot be used on this machine, or None if it can."""
    launched: LaunchedProcesses | None = None
    """The processes that a launcher has started, or None if there is only this process."""
    hypothetical: bool = False
    """True if `machine` is assumed by ``--accel-plan``. The properties of its devices are unknown."""

    def inventory(self, kind: str) -> Inventory:
        """Return the devices of `kind` on this machine, or the session's devices if `kind` is ``none``."""
        return self.machine.session if kind == "none" else self.machine.of(kind)


class LaunchedProcesses(Protocol):
    """The processes that a launcher has started together, in which the ranks of groups run."""

    @property
    def about(self) -> str:
        """One line about the processes, for the header of the session."""

    @property
    def capacity(self) -> int:
        """The maximum number of ranks of a world."""

    def missing(self, key: WorldKey, resources: Resources) -> str | None:
        """Return why the processes can never run the group of ranks of `key`, or None if they can."""


def plan_item(found: marks.Marks, chosen: Mapping[str, object], resources: Resources) -> ItemPlan:
    """Return the plan of a test with the marks `found`.

    `chosen` has the values that `marks.read` gets besides the marks. Raise `MarkError` if the marks are wrong, and
    `VendorError` if the devices of a kind cannot be looked up.
    """
    names = tuple(name for name in resources.machine.resources if name != "memory")
    devices, ranks = marks.read(found, names, **chosen)
    timeout: float | None = ranks.pop("timeout", None)
    requests = [resources.settings.fresh, devices.pop("fresh", False), ranks.pop("fresh", False)]
    at_least = max(devices.pop("at_least", 1), ranks.pop("at_least", 1), ranks.get("nodes", 1))
    number = devices.pop("n", 1)
    need = None if found.devices is None else DeviceNeed(1, **devices)
    if need is not None and resources.hypothetical:
        need = without_figures(need)
    if found.distributed is not None:
        number = ranks.pop("world_size")
        if set(backend_names(ranks.get("backend"))) == {"fake"}:
            number, ranks = 1, _in_fake_group(number, need, ranks)

    def plan(number: int) -> ItemPlan:
        if found.distributed is not None:
            key = _group_key(need, {**ranks, "world_size": number}, resources, fresh=any(requests))
        else:
            assert need is not None
            key = _process_key(replace(need, count=number), resources, fresh=any(requests))
        missing = _missing(key, resources)
        # A mark that names the kind, too, contradicts itself on every machine, and its ranks say so.
        if missing is None and "kind" not in ranks:
            missing = _backend_missing(key)
        return ItemPlan(key, timeout, missing, _number_of_devices(key, resources))

    return _largest_plan(plan, at_least, resources) if number == marks.ALL else plan(number)


def _largest_plan(plan: Callable[[int], ItemPlan], at_least: int, resources: Resources) -> ItemPlan:
    """Return the plan for the largest number that the session can run; if it can run none, the plan for `at_least`.

    A mark has "all", and ``plan(number)`` returns the plan for a number of devices or ranks. Without devices, the
    launched processes are the limit, or else the CPU cores: more ranks would be slower.
    """
    several = max(at_least, 2)
    key, launched = plan(several).key, resources.launched
    need = key.need
    if key.grouped and launched is not None:
        most = launched.capacity
    elif need is None:
        most = resources.machine.slots
    else:
        devices = resources.inventory(key.kind).devices
        # Ranks that may use one device together find several places on it.
        places = (WHOLE // (parts(need.share, device) or WHOLE) if need.sets > 1 else 1 for device in devices)
        most = sum(places) // (need.count // several)
    found = next((one for one in map(plan, range(most, at_least, -1)) if one.missing is None), plan(at_least))
    if need is None and most < at_least and found.missing is None:
        missing = f"needs at least {at_least} ranks, each with a CPU core; there {'is' if most == 1 else 'are'} {most}"
        return replace(found, missing=missing)
    return found


def _number_of_devices(key: WorldKey, resources: Resources) -> int | None:
    """Return the number for `ItemPlan.devices`."""
    kind = resources.machine.session_kind if key.need is None else key.kind
    return None if kind in (None, "none", "cpu") else len(resources.inventory(kind).devices)


def needs_of(plan: ItemPlan, resources: Resources) -> Needs:
    """Return the needs of a test with `plan`."""
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


def _process_key(need: DeviceNeed, resources: Resources, *, fresh: bool) -> WorldKey:
    """Return the key of a world of one process."""
    kind = need.kind or resources.machine.session_kind or "none"
    need = replace(need, share=need.share or _default_share(kind, resources))
    return WorldKey(kind, need, 1, grouped=False, devices_per_rank=need.count, fresh=fresh)


def _group_key(need: DeviceNeed | None, ranks: dict[str, Any], resources: Resources, *, fresh: bool) -> WorldKey:
    """Return the key of a world of ranks that each need `need`; `ranks` are the arguments of ``distributed``."""
    size: int = ranks.pop("world_size")
    machines: int = ranks.pop("nodes", 1)
    per_rank: int = ranks.pop("devices_per_rank", 1)
    requested: str | None = ranks.pop("kind", None)
    own = resources.machine.session_kind
    # No process group accepts tensors of the session's kind: ranks of a test that names no kind use the CPU.
    if own is not None and need is None and not resources.machine.vendor(own).ranks:
        own = None
    # Ranks can run on the CPU, but devices that a mark requests are accelerators.
    kind = requested or own or ("cpu" if need is None else "none")
    leased = need is not None or (kind != "cpu" if requested else own is not None)
    if leased:
        need = need or DeviceNeed(per_rank)
        share = need.share or _default_share(kind, resources)
        shared = share is not None and _can_use_one_device(kind, ranks, resources)
        need = replace(need, count=size * per_rank, kind=kind, share=share, sets=size if shared else 1)
    return WorldKey(
        kind,
        need,
        size,
        grouped=True,
        devices_per_rank=per_rank if leased else 0,
        machines=machines,
        fresh=fresh,
        **ranks,
    )


def _in_fake_group(size: int | str, need: DeviceNeed | None, ranks: dict[str, Any]) -> dict[str, Any]:
    """Return `ranks`, the arguments of ``distributed``, for one process, which is a rank of a fake group of `size`."""
    errors = []
    for argument, only in _OF_FAKE_GROUP.items():
        if (value := ranks.get(argument, only)) != only:
            errors.append(f"{argument} must be {only!r}, got {value!r}")
    if size == marks.ALL:
        errors.append(f"world_size must be an int, got {size!r}")
    if need is not None:
        errors.append("the test must not have the mark devices, too")
    if errors:
        raise marks.MarkError(
            f"@pytest.mark.distributed(backend={ranks['backend']!r}): {'; '.join(errors)}. A fake process group has "
            "any size, and runs one process on the CPU, without devices"
        )
    # No devices, even if the session has some: a test that passes on one device says nothing about the other ranks.
    return {**ranks, "kind": "cpu", "fake_size": size}


def _default_share(kind: str, resources: Resources) -> Share | None:
    """Return the share of each device for tests that request none (``accel_share``)."""
    given = resources.settings.share
    if given is None or kind == "none":
        return None
    share = parse_share(given)
    # The memory of assumed devices is unknown.
    return None if resources.hypothetical and share.bytes is not None else share


def _can_use_one_device(kind: str, ranks: dict[str, Any], resources: Resources) -> bool:
    """Return whether two ranks may use one device.

    NCCL and similar backends refuse that ("Duplicate GPU detected").
    """
    if not ranks.get("init", True):
        return True  # The test creates its own process groups, with any backend.
    names = backend_names(ranks.get("backend") or (None if kind == "none" else resources.machine.vendor(kind).backend))
    return bool(names) and set(names) <= _SHARING_BACKENDS


def _missing(key: WorldKey, resources: Resources) -> str | None:
    """Return why the session can never run a world of `key`, or None if it can."""
    if resources.machine.is_cluster:
        if key.in_cluster:
            return resources.machine.shortage(key)
        if key.launcher is not None and key.need is not None:
            return f"{key.launcher} starts its ranks on this machine, and the session uses the devices of a cluster"
    if key.grouped:
        if resources.launched is not None:
            return resources.launched.missing(key, resources)
        if key.machines > 1:
            return f"needs {key.machines} machines; a session without a launcher has 1"
        if key.launcher is not None and (missing := resources.launcher_missing(key.launcher)) is not None:
            return missing
    return missing_devices(key, resources)


def missing_devices(key: WorldKey, resources: Resources) -> str | None:
    """Return why the devices of this machine do not suffice for a world of `key`, or None if they do."""
    if key.need is None:
        return None
    missing = shortfall(key.need, resources.inventory(key.kind))
    if missing is not None and key.grouped and key.need.share is not None and key.need.sets == 1 and key.ranks > 1:
        missing += "; ranks share a device under backend='gloo' only"
    return missing


def _backend_missing(key: WorldKey) -> str | None:
    """Return why no ranks of `key` can use its backend; None if they can or this is not known."""
    for name in backend_names(key.backend) if key.grouped and key.init else ():
        kinds = KINDS_OF_BACKEND.get(name)
        if kinds is not None and key.kind not in kinds:
            here = "on the CPU" if key.kind == "cpu" else f"on {key.kind} devices"
            return f"needs {' or '.join(kinds)} devices for the backend {name}; ranks run {here} in this session"
    return None


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
