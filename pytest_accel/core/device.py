"""Data classes for devices and for the needs of tests, and the protocol of a vendor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Near = Literal["nvlink", "numa", "pcie"]


@dataclass(frozen=True, slots=True)
class Link:
    """A direct connection from one device to another, as the management library reports it."""

    peer: str
    """Id of the other device."""
    via: Near


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator that can be leased.

    ``id`` is the identity (UUID, else PCI address), which locks, leases and masks use. ``index`` is the number that the
    management library or the runtime gives it; masks of kinds without ids use it. Fields that the platform does not
    report are None or empty.
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
    """For a slice of a device (MIG): the id of the whole device."""
    cores: tuple[int, ...] = ()
    """For a CPU slot: the logical CPUs that belong to it."""
    single_process: bool = False
    """True if only one process at a time can use the device. A request for a share of it then gets the whole device."""
    speed: float | None = None
    """Number of cores times maximum clock in MHz; comparable only between devices of the same vendor."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a device: a fraction of its memory, or a number of bytes. Exactly one of the two is set."""

    fraction: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """Requirements of a test for the devices of one lease."""

    count: int
    kind: str | None = None
    """Kind of the devices; None for the session's kind."""
    memory: int | None = None
    """Minimum memory of each device in bytes."""
    capability: tuple[int, ...] | None = None
    """Minimum compute capability of each device."""
    name: str | None = None
    """Case-insensitive glob for the name of each device (``*H100*``)."""
    share: Share | None = None
    """Share of each device; None for whole devices."""
    sets: int = 1
    """Number of sets of equal size into which the `count` devices are divided: a set for each rank.

    A device occurs at most once in a set. Shared devices may occur in several sets.
    """
    near: Near | None = None
    """Kind of link preferred between the devices; None for no preference."""


def is_private(vendor: object) -> bool:
    """Return whether the devices of `vendor` are simulated for one session: its attribute `shared` is False."""
    return not getattr(vendor, "shared", True)


class MaskError(Exception):
    """A process does not see the devices of its lease. The message lists both sets and the environment variables."""


@runtime_checkable
class Vendor(Protocol):
    """Everything that is specific to one kind of accelerator.

    All methods but :meth:`verify` may run in the controller, pytest's main process, and must not initialize a device
    runtime or import torch. A vendor is pickled to xdist's workers. A rank creates its own vendor, and calls other
    methods of it without calling :meth:`discover` first.
    """

    kind: str
    """Name of the kind, as in ``--accel`` and in marks: lower-case letters, digits and underscores."""
    mask_variables: tuple[str, ...]
    """Every environment variable that restricts which devices a process sees, outermost layer first."""
    hardware: bool
    """False for kinds that are used only on request (``cpu``, ``sim``): ``auto`` never selects them."""
    backend: str | None
    """Backend of process groups on these devices; None for torch's default."""
    ranks: bool
    """False if no process group accepts tensors of this kind: ranks of tests that name no kind then use the CPU."""
    notes: tuple[str, ...]
    """Sentences on guesses and on devices that were left out in the calls so far. The device line shows them."""

    def lacking(self) -> str | None:
        """Return why torch cannot use this kind here (``torch is not built for ROCm``), or None if it can.

        ``auto`` skips a kind that torch cannot use.
        """
        ...

    def discover(self) -> tuple[Device, ...]:
        """Return every device of the machine in PCI order, whatever the mask; empty if its driver is not installed."""
        ...

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the `devices` that the mask in `environ` shows, in its order, as the device driver reads it."""
        ...

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return `devices` with the fastest first, in the device driver's order if it reports an order."""
        ...

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return changes to `environ` with which a new process sees exactly `devices`; None removes a variable."""
        ...

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """Return torch's name of each of `devices` in a process that sees exactly these (``cpu`` for a CPU slot).

        If the device driver keeps the order of the mask, the names are ``cuda:0``, ``cuda:1``, and so on. If it numbers
        devices in an order of its own, the names have those numbers, so that the session's order of devices is kept.
        """
        ...

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """Load what torch needs for this kind, in a rank, before anything else uses a device.

        Raise :class:`MaskError` unless the process sees exactly `devices`, with the names of :meth:`torch_devices`.
        """
        ...
