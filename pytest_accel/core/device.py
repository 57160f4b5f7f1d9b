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
    single_process: bool = False
    """Whether one process at a time can use it: who asks for a share then has all of it."""
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
    """None: the whole of each."""
    sets: int = 1
    """`count` is that of so many sets of equal size, one for each rank. A set has no device twice; where devices are
    shared, several sets may have one in common."""
    near: Near | None = None


@runtime_checkable
class PretendVendor(Protocol):
    """What a :class:`Vendor` has besides if its devices are pretended."""

    shared: bool
    """True if sessions lock the devices against one another, as they do real ones."""


class MaskError(Exception):
    """A process does not see the devices that its lease gives it; the message prints both and the environment."""


@runtime_checkable
class Vendor(Protocol):
    """All that the project knows about one kind of accelerator.

    Everything but :meth:`verify` runs in the controller and must not initialise a device runtime, nor import torch.
    It goes to xdist's workers by pickle. A rank makes one of its own, which has not looked into the machine before it
    is asked for anything else.
    """

    kind: str
    mask_variables: tuple[str, ...]
    """Every variable that narrows what a process sees, outermost layer first."""
    hardware: bool
    """False for kinds that only run when asked for (``cpu``, ``sim``): ``auto`` never picks them."""
    backend: str | None
    """The backend of process groups among its devices; None: the one that torch names for them."""
    ranks: bool
    """Whether ranks that name no kind run on it; False where no process group takes its tensors. They take the CPU."""
    notes: tuple[str, ...]
    """What was left out or had to be guessed in the calls so far, a sentence each."""

    def lacking(self) -> str | None:
        """What torch lacks here to use this kind, in words (``torch is not built for ROCm``); None: nothing.

        ``auto`` leaves a kind alone for which torch lacks something.
        """
        ...

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

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """What torch calls each of `devices` in a process whose mask shows exactly these (``cpu`` for a CPU slot).

        Where the driver keeps the mask's order: ``cuda:0``, ``cuda:1``, and so on. Where it counts in an order of its
        own, the numbers are those of that order, so that the session's order holds all the same.
        """
        ...

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """In the rank, before anything else uses a device: load what torch needs for this kind.

        Raises :class:`MaskError` unless the process sees exactly `devices`, under the names of :meth:`torch_devices`.
        """
        ...
