"""The devices of a session, of the kind in ``--accel``, that masks and options leave, in the session's order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_accel.core.device import Device, DeviceNeed, Vendor, is_private
from pytest_accel.core.kinds import check_kind, kinds
from pytest_accel.core.units import count_text, format_memory
from pytest_accel.core.world_key import WorldKey
from pytest_accel.hardware.device_order import WORDS, apply_order, parse_names, select
from pytest_accel.hardware.health import HealthVendor
from pytest_accel.hardware.kernel_files import cpu_slots
from pytest_accel.hardware.registry import VendorError, describe_kind, make_vendor

if TYPE_CHECKING:
    from pytest_accel.hardware.held_devices import HeldDevices


def parse_kind(text: str) -> tuple[str, str | None]:
    """Return the two parts of a value of ``--accel``: ``auto``, ``none`` or a kind, and the argument after its colon.

    Raise ValueError, with the allowed values, for an unknown kind. The vendor checks the argument later.
    """
    name, colon, argument = text.strip().partition(":")
    if name not in ("auto", "none"):
        try:
            check_kind(name)
        except ValueError:
            raise ValueError(f"--accel {text!r}: allowed are auto, none, {', '.join(kinds())}") from None
        if name == "sim" and not colon:
            raise ValueError(f"--accel {text!r}: say how many devices: sim:8, or sim:FILE.toml")
    elif colon:
        raise ValueError(f"--accel {text!r}: {name} takes nothing after a colon")
    return name, argument if colon else None


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices of one kind that a session may lease."""

    kind: str
    """Kind of the devices; ``none`` if there is no accelerator."""
    devices: tuple[Device, ...] = ()
    """The devices in the session's order."""
    order: str = ""
    """Value of ``--accel-order``; if empty, the order is the inherited mask's, or PCI order without a mask."""
    inherited: Mapping[str, str] = field(default_factory=dict)
    """Mask variables that the session has inherited, with their values."""
    present: int = 0
    """Number of devices in the machine."""
    visible: int = 0
    """Number of devices that the inherited masks leave."""
    notes: tuple[str, ...] = ()
    """Notes on what was left out and why, one sentence each."""
    outer: str = ""
    """A sentence on the test inside which this session runs, and its devices; empty if there is no such test."""
    busy: tuple[str, ...] = ()
    """Devices left out because others use them (``accel_busy = skip``), with their users, one sentence each."""
    named: bool = False
    """True if ``--accel`` names the kind: without devices, tests of ranks are skipped, and do not run on the CPU."""


class Machine:
    """Discovers the devices of this machine, each kind once and on first use.

    `accel` is ``--accel``. `only` is ``--accel-ids``: ids or indices of devices that the inherited mask leaves, in the
    order that the session uses. `order` is ``--accel-order``, if given; its indices count the same devices. `environ`
    is the environment that the session inherited (if None, this process's). `skip_busy` is True for ``accel_busy =
    skip``: devices that others use are left out, if the vendor can find out. `held` are the devices of the rank inside
    which this session runs; it leaves out other devices, except pretended ones, which it shares with nobody.
    `resources` are the named resources, each a kind of its own, with their numbers (`Settings.resources`). If an id or
    index does not exist, the first access to `session` raises ValueError.
    """

    def __init__(
        self,
        accel: str,
        only: str | None = None,
        order: str = "",
        environ: Mapping[str, str] | None = None,
        skip_busy: bool = False,
        held: HeldDevices | None = None,
        resources: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.is_cluster = False
        """True if the devices are a cluster's, in place of this machine's."""
        self.held = held
        self.resources = dict(resources)
        self._kind, self._argument = parse_kind(accel)
        self._skip_busy = skip_busy
        # Stored now: devices may be discovered later in an xdist worker, which has another pid.
        self.main_pid = held.server if held is not None else os.getpid()
        """The process whose descendants count as this session's users of devices."""
        self._only = None if only is None else parse_names(only)
        self._order = order
        self._environ = dict(os.environ if environ is None else environ)
        self._vendors: dict[str, Vendor] = {}
        self._others: dict[str, Inventory] = {}

    @cached_property
    def slots(self) -> int:
        """Number of CPU slots."""
        return cpu_slots()

    def shortage(self, key: WorldKey) -> str | None:
        """Return why a cluster can never run a world of `key`; None if it can, or if the devices are this machine's."""
        return None

    def vendor(self, kind: str) -> Vendor:
        """Return the vendor of `kind`, configured by ``--accel``.

        Raise ValueError if the kind does not exist or does not allow its argument, and :class:`VendorError` if it is
        broken or needs an argument.
        """
        if kind not in self.resources:
            check_kind(kind)
        if kind not in self._vendors:
            self._vendors[kind] = make_vendor(kind, self.argument(kind))
        return self._vendors[kind]

    def argument(self, kind: str) -> str | None:
        """Return the argument for `kind` after the colon of ``--accel``, or None; the number of a named resource."""
        if kind in self.resources:
            return str(self.resources[kind])
        return self._argument if kind == self._kind else None

    @cached_property
    def session(self) -> Inventory:
        """Devices for tests that name no kind: of the kind in ``--accel``, or of the first kind with hardware."""
        if self._kind == "none":
            return Inventory("none", notes=("--accel none: accelerators are left alone",))
        if self._kind != "auto":
            vendor = self.vendor(self._kind)
            return replace(self._take(vendor, is_session_kind=True), named=vendor.ranks)
        notes: tuple[str, ...] = ()
        for kind in kinds():
            try:
                vendor = self.vendor(kind)
                if not vendor.hardware:
                    continue
                with _in_vendor(kind):
                    if lacking := vendor.lacking():
                        # Ignore its masks: some can be read only by a torch that can use the devices.
                        found = vendor.discover()
                        notes += (f"{grouped(found)} ignored, since {lacking}",) if found else ()
                        continue
                inventory = self._take(vendor, is_session_kind=True)
            except VendorError as error:
                # With `auto`, a broken vendor must not stop a session that may not need its devices.
                notes += (str(error),)
                continue
            if inventory.present:
                return inventory
            notes += inventory.notes
        return Inventory("none", notes=notes)

    @property
    def session_kind(self) -> str | None:
        """Kind of the devices of `session`; None if there are none, and ranks without a kind run on the CPU."""
        return self.session.kind if self.session.devices or self.session.named else None

    def of(self, kind: str) -> Inventory:
        """Return the devices for tests that name `kind`; ``sim`` has none unless ``--accel`` creates them."""
        if kind == self.session.kind:
            return self.session
        if kind not in self._others:
            self._others[kind] = self._take(self.vendor(kind), is_session_kind=False)
        return self._others[kind]

    def _take(self, vendor: Vendor, is_session_kind: bool) -> Inventory:
        """Discover the devices of `vendor` and apply masks and options to them.

        Options that name devices apply to the session's kind only; `is_session_kind` is True if `vendor` has that kind.
        """
        with _in_vendor(vendor.kind):
            found = vendor.discover()
            visible = vendor.visible(found, self._environ)
        outer = self._outer(vendor)
        if outer:
            assert self.held is not None
            visible = tuple(one for one in visible if vendor.kind == self.held.kind and one.id in self.held.devices)
        inherited = {name: self._environ[name] for name in vendor.mask_variables if name in self._environ}
        devices, notes = visible, vendor.notes
        order = self._order if is_session_kind or self._order in WORDS else ""
        if is_session_kind and found and self._only is not None:
            devices = select(self._only, visible, "--accel-ids")
            notes += (f"--accel-ids {','.join(self._only)} leaves {len(devices)} of {len(visible)}",)
        if order in WORDS:
            devices = apply_order(order, devices, vendor)
        elif order and found:
            # Indices count the devices that the mask leaves, as in --accel-ids.
            devices = tuple(device for device in apply_order(order, visible, vendor) if device in devices)
        devices, busy = self._without_busy(vendor, devices)
        return Inventory(
            kind=vendor.kind,
            devices=devices,
            order=order,
            inherited=inherited,
            present=len(found),
            visible=len(visible),
            notes=notes,
            outer=outer,
            busy=busy,
        )

    def _outer(self, vendor: Vendor) -> str:
        """Return `Inventory.outer` for the devices of `vendor`; empty if this session may use all of them."""
        held, private = self.held, is_private(vendor)
        # Slots of the kind cpu are parts of the cores to which a rank is confined.
        if held is None or private or vendor.kind == "cpu" or (vendor.kind != held.kind and not vendor.hardware):
            return ""
        test = self._environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0] or f"a rank (pid {held.rank})"
        holds = count_text(len(held.devices), f"{held.kind} device")
        return f"this session runs inside {test} of another session, which holds {holds}"

    def _without_busy(self, vendor: Vendor, devices: tuple[Device, ...]) -> tuple[tuple[Device, ...], tuple[str, ...]]:
        if not self._skip_busy or not isinstance(vendor, HealthVendor):
            return devices, ()
        with _in_vendor(vendor.kind):
            health = vendor.health(devices, self.main_pid)
            busy = {device.id: health[device.id].reason for device in devices if health[device.id].state == "busy"}
        sentences = tuple(f"{one.name} ({one.id}) {busy[one.id]}" for one in devices if one.id in busy)
        return tuple(device for device in devices if device.id not in busy), sentences


@contextmanager
def _in_vendor(kind: str) -> Iterator[None]:
    """Raise :class:`VendorError` for any error in the vendor of `kind`, which may be another package's."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise VendorError(f"{describe_kind(kind)}: its devices cannot be looked up: {why}") from error


def describe(inventory: Inventory) -> str:
    """Return the line about devices in the header of a session."""
    count = len(inventory.devices)
    ranks = " (asked for by name: ranks do not run on the CPU)" if inventory.named else " (ranks run on the CPU)"
    if inventory.kind == "none":
        return f"accel: {'; '.join(inventory.notes) or 'no accelerator found'}{ranks}"
    parts = [f"accel: {inventory.kind}, {count or 'no'} device{'' if count == 1 else 's'}"]
    if count:
        parts[0] += f": {grouped(inventory.devices)}"
    if inventory.order:
        parts.append(f"order {inventory.order}")
    parts += masked(inventory)
    return "; ".join([", ".join(parts), *inventory.notes, *skipped(inventory)]) + ("" if count else ranks)


def skipped(inventory: Inventory) -> list[str]:
    """Return ``left out as busy: NVIDIA T4 (GPU-...) is used by pid 71 (python3, 2 GiB)``; empty if none is busy."""
    return [f"left out as busy: {', '.join(inventory.busy)}"] if inventory.busy else []


def masked(inventory: Inventory) -> list[str]:
    """Return the effect of each inherited mask: ``CUDA_VISIBLE_DEVICES=0,2 leaves 2 of 4``; and `Inventory.outer`."""
    left = f"leaves {inventory.visible or 'none'} of {inventory.present}"
    outer = [inventory.outer] if inventory.outer else []
    return [*(f"{name}={value} {left}" for name, value in inventory.inherited.items()), *outer]


def grouped(devices: Sequence[Device], more: Callable[[Device], str] = lambda device: "") -> str:
    """Return the devices grouped by name and properties: ``2 x NVIDIA A100 (80 GiB), NVIDIA T4 (15 GiB)``.

    `more` returns further text for the parentheses.
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


class PretendedMachine(Machine):
    """A machine with `count` devices of `kind` and none of other kinds. It does not access the real machine."""

    def __init__(self, count: int, kind: str, resources: Mapping[str, int] = MappingProxyType({})) -> None:
        """See :class:`Machine` for `resources`."""
        super().__init__("none", resources=resources)
        devices = tuple(Device(kind, f"{kind}-{number}", number, "pretended") for number in range(count))
        self.session = Inventory(kind, devices, present=count, visible=count)

    def of(self, kind: str) -> Inventory:
        """Return the devices of `kind`."""
        return super().of(kind) if kind in (self.session.kind, *self.resources) else Inventory(kind)


def without_figures(need: DeviceNeed) -> DeviceNeed:
    """Return `need` without requirements that a pretended device cannot answer: memory, capability and name.

    A share in bytes becomes the whole device.
    """
    share = need.share if need.share is not None and need.share.bytes is None else None
    return replace(need, memory=None, capability=None, name=None, share=share)
