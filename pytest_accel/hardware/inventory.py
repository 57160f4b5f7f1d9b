"""What a session has: the vendor that ``--accel`` names, and what masks and options leave of its devices, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pytest_accel.core.device import Device, Vendor
from pytest_accel.core.kinds import check_kind, kinds
from pytest_accel.core.units import format_memory
from pytest_accel.hardware.health import HealthVendor
from pytest_accel.hardware.order import Order, apply_order, parse_names, select
from pytest_accel.hardware.registry import VendorError, describe_kind, make_vendor


@dataclass(frozen=True, slots=True)
class KindSpec:
    """A parsed ``--accel``: ``auto``, ``none`` or a kind, and what stood after its colon."""

    name: str
    argument: str | None = None

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}:{self.argument}"


def parse_kind(text: str) -> KindSpec:
    """ValueError, with the allowed values, for an unknown kind; what it takes after its colon, its vendor says."""
    name, colon, argument = text.strip().partition(":")
    if name not in ("auto", "none"):
        try:
            check_kind(name)
        except ValueError:
            raise ValueError(f"--accel {text!r}: allowed are auto, none, {', '.join(kinds())}") from None
    elif colon:
        raise ValueError(f"--accel {text!r}: {name} takes nothing after a colon")
    return KindSpec(name, argument if colon else None)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices of one kind that a session may hand out."""

    kind: str
    """``none`` where there is no accelerator."""
    devices: tuple[Device, ...] = ()
    """In the session's order."""
    order: str = ""
    """The text of ``--accel-order``; empty: the order of the inherited mask, else of the PCI bus."""
    inherited: Mapping[str, str] = field(default_factory=dict)
    """The mask variables that the session found set."""
    present: int = 0
    """How many devices the machine has."""
    visible: int = 0
    """How many of them the inherited masks leave."""
    notes: tuple[str, ...] = ()
    """What was left out and why, a sentence each."""
    busy: tuple[str, ...] = ()
    """Who uses each device that does not count because it is busy, a sentence each (``--accel-busy skip``)."""


class Machine:
    """Looks into the machine, each kind once and only when it is asked for.

    `spec` is ``--accel``; `only` is ``--accel-devices`` (ids or indices into what the inherited mask leaves: it narrows
    further and sets the order); `order` is ``--accel-order``, whose indices count the same; `environ` is what the
    session inherited (None: what this process has). `skip_busy` is ``--accel-busy skip``: a device that others use does
    not count, where the vendor can tell. An id or index that is not there is a ValueError when `session` is first read.
    """

    def __init__(
        self,
        spec: KindSpec,
        only: str | None = None,
        order: Order | None = None,
        environ: Mapping[str, str] | None = None,
        skip_busy: bool = False,
    ) -> None:
        self._spec = spec
        self._skip_busy = skip_busy
        # It may look into the machine later, and in a worker: what the session runs is its own there, too.
        self._pid = os.getpid()
        self._only = None if only is None else parse_names(only, "--accel-devices")
        self._order = order
        self._environ = dict(os.environ if environ is None else environ)
        self._vendors: dict[str, Vendor] = {}
        self._others: dict[str, Inventory] = {}

    def vendor(self, kind: str) -> Vendor:
        """The vendor of `kind`, as ``--accel`` configures it; ValueError for what is no kind."""
        check_kind(kind)
        if kind not in self._vendors:
            self._vendors[kind] = make_vendor(kind, self.argument(kind))
        return self._vendors[kind]

    def argument(self, kind: str) -> str | None:
        """What ``--accel`` says of `kind` after its colon; None where it says nothing."""
        return self._spec.argument if kind == self._spec.name else None

    @cached_property
    def session(self) -> Inventory:
        """The kind that tests get which name none: the one of ``--accel``, or the first with hardware."""
        if self._spec.name == "none":
            return Inventory("none", notes=("--accel none: accelerators are left alone",))
        if self._spec.name != "auto":
            return self._take(self.vendor(self._spec.name), mine=True)
        notes: tuple[str, ...] = ()
        for kind in kinds():
            try:
                vendor = self.vendor(kind)
                if not vendor.hardware:
                    continue
                lacking = vendor.lacking()
                inventory = self._take(vendor, mine=lacking is None)
            except VendorError as error:
                # What only `auto` asked for must not stop a session that does not need it.
                notes += (str(error),)
                continue
            if inventory.present and lacking is None:
                return inventory
            left_alone = f"{grouped(inventory.devices)} left alone, for {lacking}"
            notes += (left_alone,) if inventory.present else inventory.notes
        return Inventory("none", notes=notes)

    def of(self, kind: str) -> Inventory:
        """What a test gets that names `kind`; ``sim`` is empty unless ``--accel`` made some."""
        if kind == self.session.kind:
            return self.session
        if kind not in self._others:
            self._others[kind] = self._take(self.vendor(kind), mine=False)
        return self._others[kind]

    def _take(self, vendor: Vendor, mine: bool) -> Inventory:
        """`mine`: the options that name devices speak of the session's kind only."""
        try:
            found = vendor.discover()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise VendorError(f"{describe_kind(vendor.kind)}: its devices cannot be looked up: {why}") from error
        visible = vendor.visible(found, self._environ)
        inherited = {name: self._environ[name] for name in vendor.mask_variables if name in self._environ}
        devices, notes = visible, vendor.notes
        order = self._order if mine or self._order is None or self._order.how != "ids" else None
        if mine and found and self._only is not None:
            devices = select(self._only, visible, "--accel-devices")
            notes += (f"--accel-devices {','.join(self._only)} leaves {len(devices)} of {len(visible)}",)
        if order is not None and order.how == "ids" and found:
            # Its indices count what the mask leaves, as those of --accel-devices do.
            devices = tuple(device for device in apply_order(order, visible, vendor) if device in devices)
        elif order is not None and order.how != "ids":
            devices = apply_order(order, devices, vendor)
        devices, busy = self._without_busy(vendor, devices)
        return Inventory(
            kind=vendor.kind,
            devices=devices,
            order=str(order or ""),
            inherited=inherited,
            present=len(found),
            visible=len(visible),
            notes=notes,
            busy=busy,
        )

    def _without_busy(self, vendor: Vendor, devices: tuple[Device, ...]) -> tuple[tuple[Device, ...], tuple[str, ...]]:
        if not self._skip_busy or not isinstance(vendor, HealthVendor):
            return devices, ()
        health = vendor.health(devices, self._pid)
        busy = {device.id: health[device.id].reason for device in devices if health[device.id].state == "busy"}
        told = tuple(f"{one.name} ({one.id}) {busy[one.id]}" for one in devices if one.id in busy)
        return tuple(device for device in devices if device.id not in busy), told


def describe(inventory: Inventory) -> str:
    """The session's header line."""
    if inventory.kind == "none":
        what = "; ".join(inventory.notes) or "no accelerator found"
        return f"accel: {what} (ranks run on the CPU)"
    count = len(inventory.devices)
    parts = [f"accel: {inventory.kind}, {count or 'no'} device{'' if count == 1 else 's'}"]
    if count:
        parts[0] += f": {grouped(inventory.devices)}"
    if inventory.order:
        parts.append(f"order {inventory.order}")
    parts += masked(inventory)
    return "; ".join([", ".join(parts), *inventory.notes, *skipped(inventory)])


def skipped(inventory: Inventory) -> list[str]:
    """``left out as busy: NVIDIA T4 (GPU-...) is used by pid 71 (python3, 2 GiB)``; nothing where no device is busy."""
    return [f"left out as busy: {', '.join(inventory.busy)}"] if inventory.busy else []


def masked(inventory: Inventory) -> list[str]:
    """What came of each inherited mask: ``CUDA_VISIBLE_DEVICES=0,2 leaves 2 of 4``."""
    left = f"leaves {inventory.visible or 'none'} of {inventory.present}"
    return [f"{name}={value} {left}" for name, value in inventory.inherited.items()]


def grouped(devices: Sequence[Device], more: Callable[[Device], str] = lambda device: "") -> str:
    """Names with what tells them apart, counted: ``2 x NVIDIA A100 (80 GiB), NVIDIA T4 (15 GiB)``.

    `more` adds to what stands in parentheses.
    """
    counts: dict[str, int] = {}
    for device in devices:
        figures = [format_memory(device.memory)] if device.memory else []
        if device.cores:
            figures.append(f"{len(device.cores)} cores" if len(device.cores) > 1 else "1 core")
        figures += [more(device)] if more(device) else []
        text = f"{device.name} ({', '.join(figures)})" if figures else device.name
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in counts.items())
