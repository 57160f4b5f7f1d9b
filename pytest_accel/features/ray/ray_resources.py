"""The devices and the resources of a Ray cluster.

A world is described in Ray's terms: resource names, amounts, bundles of a placement group. For its plans, a session has
the devices of the cluster in the form of a `Machine`: Ray knows their number on each machine, and their model.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import kinds
from pytest_accel.core.units import count_text
from pytest_accel.core.world_key import WorldKey
from pytest_accel.hardware.inventory import Inventory, KindSpec, Machine
from pytest_accel.hardware.matching import shortfall
from pytest_accel.pool.starter import PlaceError

RESOURCES = {
    "cuda": "GPU",
    "rocm": "GPU",
    "xpu": "GPU",
    "sim": "GPU",
    "tpu": "TPU",
    "npu": "NPU",
    "hpu": "HPU",
    "neuron": "neuron_cores",
}
"""Ray's names (`ray._private.accelerators`) of the resources whose devices it assigns, by kind.

``sim`` counts as GPU, so that nodes can declare simulated devices (``ray start --num-gpus=4``).
"""
TYPE_LABEL = "ray.io/accelerator-type"
"""Label of a node with the model of its accelerators, as ``H100``; Ray sets it on nodes with accelerators."""
NODE_LABEL = "ray.io/node-id"
"""Label of each node with its id."""
_STEPS = 10_000
"""Ray counts resources in steps of 1/10000."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """One node of a Ray cluster."""

    id: str
    """The id that Ray has given to the node."""
    name: str
    """The host name."""
    address: str
    resources: Mapping[str, float]
    """Total amounts by name, including those in use."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RayDemand:
    """The resources that a world needs, before it is decided how its ranks are distributed."""

    resource: str
    ranks: int
    per_rank: int
    """Devices of each rank; for ranks on the CPU, 1."""
    nodes: int
    """Minimum number of nodes."""
    divisible: bool
    """True if the ranks may be on more nodes than the minimum."""
    share: float | None = None
    """Fraction of each device; None: whole devices."""
    name: str | None = None
    """Glob for the name of the devices."""
    avoided: frozenset[str] = frozenset()
    """Ids of the nodes that must not be used."""

    def amount(self, ranks: int) -> float:
        """Return the amount of the resource for `ranks` ranks on one node.

        Ray divides single devices only: an amount above 1 is a whole number. Ranks that share devices get one device
        as long as their shares fit on it.
        """
        if self.share is None:
            return ranks * self.per_rank
        if self.per_rank == 1 and ranks * self.share <= 1:
            return math.ceil(round(ranks * self.share * _STEPS, 6)) / _STEPS
        ranks_per_device = max(1, math.floor(round(1 / self.share, 6)))
        return self.per_rank * math.ceil(ranks / ranks_per_device)


@dataclass(frozen=True, slots=True)
class Bundles:
    """The bundles of a placement group, each on a node of its own. Worlds with equal bundles can use the same place."""

    resource: str
    ranks: tuple[int, ...]
    """Number of ranks in each bundle."""
    amounts: tuple[float, ...]
    """Amount of the resource in each bundle."""
    models: tuple[str, ...] = ()
    """Values of `TYPE_LABEL` that are allowed; empty: any."""
    avoided: frozenset[str] = frozenset()
    """Ids of the nodes that must not be used."""

    @property
    def text(self) -> str:
        """The bundles in words: ``4 GPU on one node``, ``2 GPU on each of 3 nodes``."""
        model = f" ({' or '.join(self.models)})" if self.models else ""
        amounts = [f"{amount:g}" for amount in self.amounts]
        if len(amounts) == 1:
            return f"{amounts[0]} {self.resource}{model} on one node"
        if len(set(amounts)) == 1:
            return f"{amounts[0]} {self.resource}{model} on each of {len(amounts)} nodes"
        return f"{' and '.join(amounts)} {self.resource}{model} on {len(amounts)} nodes"

    def usable(self, nodes: Iterable[RayNode]) -> list[RayNode]:
        """Return the `nodes` that may be used, have the resource and an allowed model, the largest first."""
        found = [
            node
            for node in nodes
            if node.id not in self.avoided
            and node.resources.get(self.resource)
            and (not self.models or node.labels.get(TYPE_LABEL) in self.models)
        ]
        return sorted(found, key=lambda node: -node.resources[self.resource])

    def fits(self, nodes: Iterable[RayNode]) -> bool:
        """Return whether `nodes`, if nothing else used them, can hold the bundles."""
        sizes = [node.resources[self.resource] for node in self.usable(nodes)]
        amounts = sorted(self.amounts, reverse=True)
        return len(sizes) >= len(amounts) and all(amount <= size for amount, size in zip(amounts, sizes, strict=False))

    def shortage(self, nodes: Sequence[RayNode]) -> str:
        """Return why `nodes` cannot hold the bundles, which do not fit."""
        usable = self.usable(nodes)
        if not usable:
            node = "other node" if self.avoided else "node"
            there = f"no {node} of the Ray cluster has {self.resource}" + (" of that model" if self.models else "")
        elif usable[0].resources[self.resource] < max(self.amounts):
            size = usable[0].resources[self.resource]
            there = f"the largest node of the Ray cluster ({usable[0].name}) has {size:g}"
        else:
            large = sum(node.resources[self.resource] >= min(self.amounts) for node in usable)
            there = f"the Ray cluster has {large} such {'node' if large == 1 else 'nodes'}"
        return f"needs {self.text}; {there}"


def demand_of(key: WorldKey) -> RayDemand:
    """Return the demand of a world of `key`; raise PlaceError if Ray does not assign devices of its kind."""
    if key.need is None:
        return RayDemand("CPU", key.ranks, 1, key.machines, divisible=key.grouped)
    if key.kind not in RESOURCES:
        raise PlaceError(f"Ray does not assign devices of kind {key.kind!r}; it assigns {', '.join(RESOURCES)}")
    # Ray divides only GPUs, and does not know their memory, so a share in bytes takes the whole device. Ranks that
    # cannot use one device together (`sets` is 1) need a device each, whatever their share.
    resource = RESOURCES[key.kind]
    shared = key.need.share is not None and (key.need.sets > 1 or key.need.count == 1) and resource == "GPU"
    return RayDemand(
        resource,
        key.ranks,
        key.devices_per_rank,
        key.machines,
        divisible=key.grouped,
        share=key.need.share.fraction if key.need.share is not None and shared else None,
        name=key.need.name,
    )


def choose_bundles(demand: RayDemand, nodes: Sequence[RayNode], models: Iterable[str] = ()) -> Bundles:
    """Return the bundles for `demand` on a cluster with `nodes`.

    There are as few bundles as possible: more than `demand.nodes` only if no node is large enough. If no number of
    bundles fits, `demand.nodes` bundles are returned. `models` has the values of `TYPE_LABEL` that Ray knows, since an
    autoscaler may add nodes with them.
    """
    allowed = _models(demand, nodes, models)
    most = min(demand.ranks, len(nodes)) if demand.divisible else demand.nodes
    for count in range(demand.nodes, most + 1):
        bundles = _divide(demand, count, allowed)
        if bundles.fits(nodes):
            return bundles
    return _divide(demand, demand.nodes, allowed)


def _divide(demand: RayDemand, count: int, models: tuple[str, ...]) -> Bundles:
    """Return `count` bundles, with the ranks distributed as `Layout.seats` does."""
    each, rest = divmod(demand.ranks, count)
    ranks = tuple(each + (number < rest) for number in range(count))
    return Bundles(demand.resource, ranks, tuple(map(demand.amount, ranks)), models, demand.avoided)


def _models(demand: RayDemand, nodes: Iterable[RayNode], models: Iterable[str]) -> tuple[str, ...]:
    """Return the models that match the requested name; empty (no restriction) if this cannot be decided.

    The requested name is a glob for the full name of a device, such as ``*H100*`` for ``NVIDIA H100 80GB HBM3``. Ray's
    model is only a part of the full name (``H100``). There is no restriction if no name is requested, a node does not
    state its model, or no model matches: the lease of the devices compares the full names.
    """
    if demand.name is None:
        return ()
    known = set(models)
    for node in nodes:
        if node.resources.get(demand.resource):
            if TYPE_LABEL not in node.labels:
                return ()
            known.add(node.labels[TYPE_LABEL])
    pattern = demand.name.casefold()
    words = set(re.split(r"[^a-z0-9]+", pattern))
    return tuple(
        sorted(model for model in known if model.casefold() in words or fnmatchcase(model.casefold(), pattern))
    )


class RayMachine(Machine):
    """The devices of all nodes of a Ray cluster, in place of those of one machine.

    Ray does not know the memory and the capability of devices: an agent compares these when it leases them. Slots of
    the kind ``cpu`` and named resources are those of this machine, since no cluster places them.
    """

    def __init__(self, spec: KindSpec, nodes: Sequence[RayNode], own: Machine, *, can_scale: bool) -> None:
        """`own` is this machine. `can_scale` is True if the cluster may add nodes that tests need."""
        super().__init__(spec, resources=own.resources)
        self.is_cluster = True
        self.nodes = tuple(nodes)
        self._own = own
        self._can_scale = can_scale
        self.session = self._inventory(spec)

    def of(self, kind: str) -> Inventory:
        """Return the devices of `kind`."""
        if kind == self.session.kind:
            return self.session
        return self._own.of(kind) if kind == "cpu" or kind in self.resources else Inventory(kind)

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
            return replace(self._devices(spec.name), named=True)
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
