"""The devices and the resources of a Ray cluster.

A world is described in Ray's terms: resource names, amounts, bundles of a placement group. For its plans, a session has
the devices of the cluster in the form of a `Machine`: Ray knows their number on each node, and their model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import kinds
from pytest_accel.core.units import count_text
from pytest_accel.core.world_key import WorldKey
from pytest_accel.hardware.inventory import Inventory, Machine
from pytest_accel.hardware.matching import shortfall
from pytest_accel.leases.shared_folder import PlaceError

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
class Bundles:
    """The bundles of a placement group for a world, each on a node of its own."""

    resource: str
    ranks: tuple[int, ...]
    """Number of ranks in each bundle."""
    amounts: tuple[float, ...]
    """Amount of the resource in each bundle."""
    models: tuple[str, ...] = ()
    """Values of `TYPE_LABEL` that are allowed; empty: any."""

    @property
    def text(self) -> str:
        """The bundles in words: ``4 GPU on 1 node``, ``2 + 1 GPU (H100) on 2 nodes``."""
        amounts = " + ".join(f"{amount:g}" for amount in self.amounts)
        model = f" ({' or '.join(self.models)})" if self.models else ""
        return f"{amounts} {self.resource}{model} on {count_text(len(self.amounts), 'node')}"

    @property
    def labels(self) -> dict[str, str]:
        """The labels that nodes must have, as Ray's selectors."""
        return {TYPE_LABEL: f"in({','.join(self.models)})"} if self.models else {}

    def shortage(self, nodes: Iterable[RayNode]) -> str | None:
        """Return why `nodes`, if nothing else used them, cannot hold the bundles; None if they can."""
        usable = [
            (node.resources[self.resource], node.name)
            for node in nodes
            if node.resources.get(self.resource) and (not self.models or node.labels.get(TYPE_LABEL) in self.models)
        ]
        largest = sorted(usable, reverse=True)[: len(self.amounts)]
        amounts = sorted(self.amounts, reverse=True)
        if len(largest) == len(amounts) and all(
            size >= amount for amount, (size, _) in zip(amounts, largest, strict=False)
        ):
            return None
        there = ", ".join(f"{name} with {size:g}" for size, name in largest) or "none"
        return f"needs {self.text}; the largest nodes of the Ray cluster: {there}"


def choose_bundles(key: WorldKey, nodes: Sequence[RayNode], models: Iterable[str] = ()) -> Bundles:
    """Return the bundles for a world of `key` on a cluster with `nodes`.

    There are as few bundles as possible: more than `key.machines` only if no node is large enough. If no number of
    bundles fits, `key.machines` bundles are returned. `models` has the values of `TYPE_LABEL` that Ray knows, since an
    autoscaler may add nodes with them. Raise PlaceError if Ray does not assign devices of the kind.
    """
    if key.need is not None and key.kind not in RESOURCES:
        raise PlaceError(f"Ray does not assign devices of kind {key.kind!r}; it assigns {', '.join(RESOURCES)}")
    resource = "CPU" if key.need is None else RESOURCES[key.kind]
    allowed = _models(key, resource, nodes, models)

    def divide(count: int) -> Bundles:
        """Return `count` bundles, with the ranks distributed as `Layout.machines_of` does."""
        each, rest = divmod(key.ranks, count)
        ranks = tuple(each + (number < rest) for number in range(count))
        amounts = tuple(_amount(key, resource, one) for one in ranks)
        return Bundles(resource, ranks, amounts, allowed)

    most = min(key.ranks, len(nodes)) if key.grouped else key.machines
    found = map(divide, range(key.machines, most + 1))
    return next((bundles for bundles in found if bundles.shortage(nodes) is None), divide(key.machines))


def _amount(key: WorldKey, resource: str, ranks: int) -> float:
    """Return the amount of the resource for `ranks` ranks on one node.

    Ray divides only GPUs, and only single ones: an amount above 1 is a whole number. Ranks that share devices get one
    device as long as their shares fit on it.
    """
    if key.need is None:
        return ranks
    share = key.need.share.fraction if key.need.share is not None else None
    # Ray does not know the memory of devices, so a share in bytes takes the whole device. Ranks that cannot use one
    # device together (`sets` is 1) need a device each, whatever their share.
    if share is None or resource != "GPU" or (key.need.sets == 1 and key.need.count > 1):
        return ranks * key.devices_per_rank
    if key.devices_per_rank == 1 and ranks * share <= 1:
        return math.ceil(round(ranks * share * _STEPS, 6)) / _STEPS
    return key.devices_per_rank * math.ceil(ranks / max(1, math.floor(round(1 / share, 6))))


def _models(key: WorldKey, resource: str, nodes: Iterable[RayNode], models: Iterable[str]) -> tuple[str, ...]:
    """Return the models that match the requested name; empty (no restriction) if this cannot be decided.

    The requested name is a glob for the full name of a device, such as ``*H100*`` for ``NVIDIA H100 80GB HBM3``. Ray's
    model is only a part of the full name (``H100``). There is no restriction if no name is requested, a node does not
    state its model, or no model matches: the lease of the devices compares the full names.
    """
    stated = [node.labels.get(TYPE_LABEL) for node in nodes if node.resources.get(resource)]
    if key.need is None or key.need.name is None or None in stated:
        return ()
    pattern = key.need.name.casefold()
    words = set(re.split(r"[^a-z0-9]+", pattern))
    return tuple(
        sorted(
            model
            for model in {*models, *filter(None, stated)}
            if model.casefold() in words or fnmatchcase(model.casefold(), pattern)
        )
    )


class RayMachine(Machine):
    """The devices of all nodes of a Ray cluster, in place of one machine's.

    Ray does not know the memory and the capability of devices: an agent compares these when it leases them. Slots of
    the kind ``cpu`` and named resources are this machine's, since no cluster places them.
    """

    def __init__(self, accel: str, nodes: Sequence[RayNode], own: Machine, *, can_scale: bool) -> None:
        """`own` is this machine. `can_scale` is True if the cluster may add nodes that tests need."""
        super().__init__(accel, resources=own.resources)
        self.is_cluster = True
        self._nodes = tuple(nodes)
        self._own = own
        self._can_scale = can_scale
        self.session = self._inventory()

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
            bundles = choose_bundles(key, self._nodes)
        except PlaceError as error:
            return str(error)
        return None if self._can_scale else bundles.shortage(self._nodes)

    def _inventory(self) -> Inventory:
        """Return the devices of the kind in ``--accel``; with ``auto``, of the first kind that torch can use."""
        if self._kind == "none":
            return self._own.session
        if self._kind != "auto":
            return replace(self._devices(self._kind), named=True)
        notes: list[str] = []
        for kind in kinds():
            resource = RESOURCES.get(kind, "")
            if not any(node.resources.get(resource) for node in self._nodes) or not self.vendor(kind).hardware:
                continue
            if (lacking := self.vendor(kind).lacking()) is None:
                return self._devices(kind)
            notes.append(f"{resource} cannot be {kind} devices, since {lacking}")
        none = "no node of the Ray cluster has an accelerator for this session"
        if self._can_scale:
            none += " (name their kind with --accel to have its autoscaler add some)"
        return Inventory("none", notes=(none, *notes))

    def _devices(self, kind: str) -> Inventory:
        devices = tuple(
            Device(kind, f"{node.id}/{number}", number, node.labels.get(TYPE_LABEL, kind))
            for node in self._nodes
            for number in range(int(node.resources.get(RESOURCES.get(kind, ""), 0)))
        )
        where = f"on {count_text(len(self._nodes), 'node')} of a Ray cluster"
        if self._can_scale:
            where += ", whose autoscaler may add some"
        return Inventory(kind, devices, present=len(devices), visible=len(devices), notes=(where,))
