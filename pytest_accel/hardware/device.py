"""The words of the hardware floor: a device, what a process needs, and what a vendor can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Near = Literal["nvlink", "numa", "pcie"]


@dataclass(frozen=True, slots=True)
class Link:
    """A direct connection from one device to another, as the management library reports it."""

    peer: str
    """The other device's id."""
    via: Near


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator that can be handed out.

    ``id`` is the identity (UUID, else PCI address): it is what locks, leases and masks speak of. ``index`` is the
    management library's number, good for showing to people and for nothing else.
    """

    kind: str
    id: str
    index: int
    name: str
    memory: int | None = None
    """Total memory in bytes."""
    memory_free: int | None = None
    """Free memory in bytes when the inventory was taken."""
    capability: tuple[int, ...] | None = None
    """For example ``(9, 0)``."""
    pci: str | None = None
    numa: int | None = None
    links: tuple[Link, ...] = ()
    parent: str | None = None
    """For a slice of a device (MIG): the id of the whole one."""
    cores: tuple[int, ...] = ()
    """For a CPU slot: the logical CPUs that belong to it."""
    speed: float | None = None
    """Cores times maximum clock in MHz: comparable between devices of one vendor only."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a device: a fraction of its memory, or bytes of it. Exactly one is set."""

    fraction: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What a test asks of the devices that one lease gives it."""

    count: int
    kind: str | None = None
    """None: the session's kind."""
    memory: int | None = None
    """At least so many bytes each."""
    capability: tuple[int, ...] | None = None
    """At least this each."""
    name: str | None = None
    """A case-insensitive glob (``*H100*``)."""
    share: Share | None = None
    near: Near | None = None


class MaskError(Exception):
    """A process does not see the devices that its lease gives it; the message prints both and the environment."""


@runtime_checkable
class Vendor(Protocol):
    """All that the project knows about one kind of accelerator.

    Everything but :meth:`verify` runs in the controller and must not initialise a device runtime, nor import torch.
    """

    kind: str
    mask_variables: tuple[str, ...]
    """Every variable that narrows what a process sees, outermost layer first."""
    hardware: bool
    """False for kinds that only run when asked for (``cpu``, ``sim``): ``auto`` never picks them."""
    honours_order: bool
    """Whether the order of ids in the mask becomes the order of the devices that a process sees."""
    notes: tuple[str, ...]
    """What was left out or had to be guessed in the calls so far, a sentence each."""

    def discover(self) -> tuple[Device, ...]:
        """Every device in the machine, whatever the mask, in PCI order. Empty where the driver is absent."""
        ...

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """What an inherited mask leaves of `devices`, in the mask's order, read as the driver reads it."""
        ...

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """`devices` with the fastest first, asking the driver where it can be asked."""
        ...

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """The changes to `environ` under which a new process sees exactly `devices`; None removes a variable."""
        ...

    def torch_device(self, index: int) -> str:
        """What torch calls the process's `index`-th visible device (``cuda:0``; ``cpu`` for a CPU slot)."""
        ...

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """In the rank: raise :class:`MaskError` unless the process sees exactly `devices` in this order."""
        ...
