"""The devices of a Ray cluster, as a session plans with them: Ray knows their number on each node, and their model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import kinds
from pytest_accel.core.units import count_text
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.ray.ray_resources import RESOURCES, TYPE_LABEL, RayNode, choose_bundles, demand_of
from pytest_accel.hardware.inventory import Inventory, KindSpec, Machine
from pytest_accel.hardware.matching import shortfall
from pytest_accel.pool.placement import PlaceError


class RayMachine(Machine):
    """The devices of all nodes of a Ray cluster, in place of those of one machine.

    Ray does not know the memory and the capability of devices: an agent compares these when it leases them. Slots of
    the kind ``cpu`` are those of this machine, since no cluster places them.
    """

    def __init__(self, spec: KindSpec, nodes: Sequence[RayNode], own: Machine, *, can_scale: bool) -> None:
        """`own` is this machine. `can_scale` is True if the cluster may add nodes that tests need."""
        super().__init__(spec)
        self.is_cluster = True
        self.nodes = tuple(nodes)
        self._own = own
        self._can_scale = can_scale
        self.session = self._inventory(spec)

    @property
    def session_kind(self) -> str | None:
        """Kind of the devices that the cluster has, or that its autoscaler can add; None without devices."""
        return self.session.kind if self._can_grow else super().session_kind

    @property
    def _can_grow(self) -> bool:
        """True if the cluster may get devices of the session's kind, even if it has none now."""
        return self._can_scale and self.session.kind in RESOURCES

    def of(self, kind: str) -> Inventory:
        """Return the devices of `kind`."""
        if kind == self.session.kind:
            return self.session
        return self._own.of(kind) if kind == "cpu" else Inventory(kind)

    def shortage(self, key: WorldKey) -> str | None:
        """Return why the cluster can never run a world of `key`; None if it can, or may once it has more nodes."""
        if key.need is not None and key.kind == "none":
            return shortfall(key.need, self.session)
        try:
            bundles = choose_bundles(demand_of(key), self.nodes)
        except PlaceError as error:
            return str(error)
        return None if self._can_scale or bundles.fits(self.nodes) else bundles.shortage(self.nodes)

    def _inventory(self, spec: KindSpec) -> Inventory:
        """Return the devices of the kind of `spec`; with ``auto``, of the first that torch can use."""
        if spec.name == "none":
            return self._own.session
        if spec.name != "auto":
            return self._devices(spec.name)
        notes: list[str] = []
        for kind in kinds():
            resource = RESOURCES.get(kind, "")
            if not any(node.resources.get(resource) for node in self.nodes) or not self.vendor(kind).hardware:
                continue
            if (lacking := self.vendor(kind).lacking()) is None:
                return self._devices(kind)
            notes.append(f"{resource} cannot be {kind} devices, since {lacking}")
        none = "no node of the Ray cluster has an accelerator for this session"
        if self._can_scale:
            none += " (name their kind with --accel to have its autoscaler add some)"
        return Inventory("none", notes=(none, *notes))

    def _devices(self, kind: str) -> Inventory:
        names = Counter(node.name for node in self.nodes)
        devices = tuple(
            Device(
                kind,
                f"{node.name if names[node.name] == 1 else node.address}/{number}",
                number,
                node.labels.get(TYPE_LABEL, kind),
            )
            for node in self.nodes
            for number in range(int(node.resources.get(RESOURCES.get(kind, ""), 0)))
        )
        where = f"on {count_text(len(self.nodes), 'node')} of a Ray cluster"
        if self._can_scale:
            where += ", whose autoscaler may add some"
        return Inventory(kind, devices, present=len(devices), visible=len(devices), notes=(where,))
