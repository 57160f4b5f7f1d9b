"""NVIDIA GPUs, through the management library (NVML), which ignores masks and does not initialise CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.device_order import by_figures, by_pci
from pytest_accel.hardware.health import Health, judge, judge_all
from pytest_accel.hardware.kernel_files import numa_node
from pytest_accel.hardware.masks import read_list, write_mask
from pytest_accel.hardware.queries import answer
from pytest_accel.hardware.vendors.base_vendor import BaseVendor, uuids_in_torch
from pytest_accel.hardware.vendors.nvml import condition, driver_installed, links, optional, pci_address, users

(_MASK,) = KINDS["cuda"].masks
_ORDER = "CUDA_DEVICE_ORDER"

# CUresult is 0 for success. Version 2 of the UUID call distinguishes MIG instances; drivers before 11.4 have only the
# first.
_SCRIPT = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status:
        # CUDA_ERROR_NO_DEVICE: the mask hides every device.
        raise SystemExit(0 if status == 100 else f"{name} returned {status}")
call("cuInit", 0)
count = ctypes.c_int()
call("cuDeviceGetCount", ctypes.byref(count))
for index in range(count.value):
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid", uuid, device)
    text = bytes(uuid).hex()
    print("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))
"""


def ask_driver(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs (without prefix) of the devices that CUDA shows to a process with `environ`, in its order.

    Raise OSError if CUDA is absent or does not answer.
    """
    # -I and -S: ignore site packages and the working directory, so that the process starts in milliseconds.
    return tuple(answer([sys.executable, "-I", "-S", "-c", _SCRIPT], environ).split())


class Cuda(BaseVendor):
    """The vendor of kind ``cuda``; a device's id is its UUID."""

    _cards: tuple[Device, ...] = ()

    def discover(self) -> tuple[Device, ...]:
        """Return every GPU and MIG instance, in PCI order; empty without a driver.

        GPUs that the process may not access, that have no UUID or that are sick (`judge`) are left out, with a line in
        `notes`. Of a GPU in MIG mode, the instances are returned instead of the GPU.
        """
        # Loading the bindings takes about 20 ms, which is saved on a machine without the driver.
        if not driver_installed():
            return ()
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.notes = (f"the NVIDIA driver does not answer: {error}",)
            return ()
        try:
            return self._enumerate(pynvml)
        finally:
            pynvml.nvmlShutdown()

    def health(self, devices: Sequence[Device], session: int | None = None) -> Mapping[str, Health]:
        """See `HealthVendor.health`. A MIG instance is sick if its card is, and busy by its own processes."""
        if not devices:
            return {}
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return {device.id: Health() for device in devices}
        try:
            facts = {device.id: users(pynvml, device) for device in devices}
        finally:
            pynvml.nvmlShutdown()
        return judge_all(facts, session)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that the mask leaves; a card in MIG mode stands for all its instances.

        A process would see only the first instance, but the session may lease all of them. A list of whole ids of one
        form, or of indices if CUDA counts in PCI order, is read here; for any other mask, CUDA is asked.
        """
        text = environ.get(_MASK)
        if text is None or not devices:
            return tuple(devices)
        cards = [card.id for card in self._cards] or list(dict.fromkeys(one.parent or one.id for one in devices))
        parts = {card: tuple(one for one in devices if card in (one.id, one.parent)) for card in cards}
        instances = {one.id: (one,) for one in devices if one.parent}
        in_pci_order = environ.get(_ORDER) == "PCI_BUS_ID" or _alike(self._cards or devices)
        indices = {str(index): part for index, part in enumerate(parts.values()) if in_pci_order}
        for names in (parts, instances, indices):
            entries = read_list(text, names)
            if entries is not None:
                return tuple(one for entry in entries for one in names[entry])
        try:
            seen = ask_driver(environ)
        except OSError as error:
            self.note(f"no device is used: only CUDA can read {_MASK}={text!r}, and it does not answer: {error}")
            return ()
        # For a card in MIG mode CUDA returns the UUID of the instance that a process would get.
        whole = not text.startswith("MIG-")
        known = {_bare(one.id): parts[one.parent or one.id] if whole else (one,) for one in devices}
        return tuple(dict.fromkeys(one for uuid in seen for one in known.get(uuid, ())))

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return `devices` in CUDA's own order, found out in a short process.

        The rule behind ``CUDA_DEVICE_ORDER=FASTEST_FIRST`` is not public, so CUDA is asked. `by_figures` sorts the
        devices if that order does not contain all of them. GPUs that are all alike are sorted by PCI address.
        """
        if _alike(devices):
            return by_pci(devices)
        environ = {name: value for name, value in os.environ.items() if name != _MASK}
        try:
            order = ask_driver({**environ, _ORDER: "FASTEST_FIRST"})
        except OSError:
            order = ()
        if not {_bare(device.id) for device in devices} <= {*order}:
            return by_figures(devices)
        return tuple(sorted(devices, key=lambda device: order.index(_bare(device.id))))

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask of UUIDs, which do not depend on the order.

        The PCI order is set for tools that turn the UUIDs into indices.
        """
        return {_MASK: write_mask(devices), _ORDER: "PCI_BUS_ID"}

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        import torch

        reason = "" if torch.version.cuda else "; this torch was built without CUDA"
        self.compare(devices, uuids_in_torch(), environ, reason)

    def is_same(self, device: Device, seen: str) -> bool:
        # For a MIG instance torch returns the UUID of the card.
        return device.id.startswith("MIG-") or seen == "?" or _bare(device.id) == _bare(seen)

    def _enumerate(self, nvml: Any) -> tuple[Device, ...]:
        self.notes = ()
        cards: list[tuple[Device, Any]] = []
        for index in range(optional(nvml, nvml.nvmlDeviceGetCount) or 0):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                cards.append((self._describe(nvml, handle, index, nvml.nvmlDeviceGetUUID(handle)), handle))
            except nvml.NVMLError as error:
                self.note(f"GPU {index} is left out: {error}")
        place = {card.id: at for at, card in enumerate(by_pci([card for card, _ in cards]))}
        cards.sort(key=lambda pair: place[pair[0].id])
        linked = links(nvml, cards)
        devices: list[Device] = []
        counted: list[Device] = []
        for card, handle in cards:
            found = self._instances(nvml, card, handle)
            if found is None:
                found = (replace(card, links=linked[card.id]),)
            elif not found:
                self.note(f"{card.name} ({card.id}) is left out: it is in MIG mode and has no instance")
            if found:
                counted.append(card)  # Also a sick card, which is left out below: the indices in masks count it.
            facts = condition(nvml, handle)
            health = judge(facts)
            if found and health.state == "sick":
                self.note(f"{card.name} ({card.id}) is left out: {health.reason}")
                continue
            if found and facts.compute_mode == "exclusive_process":
                found = tuple(replace(device, single_process=True) for device in found)
                self.note(f"{card.name} ({card.id}) serves one process at a time (compute mode EXCLUSIVE_PROCESS)")
            devices += found
        self._cards = tuple(counted)
        return tuple(devices)

    def _describe(self, nvml: Any, handle: Any, index: int, uuid: str) -> Device:
        memory = optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        cores = optional(nvml, nvml.nvmlDeviceGetNumGpuCores, handle)
        clock = optional(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
        pci = pci_address(optional(nvml, nvml.nvmlDeviceGetPciInfo, handle))
        return Device(
            kind=self.kind,
            id=uuid,
            index=index,
            name=optional(nvml, nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU",
            memory=memory.total if memory else None,
            memory_free=memory.free if memory else None,
            capability=optional(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle),
            pci=pci,
            # Not ``nvmlDeviceGetNumaNodeId``, which returns the node that a GPU's own memory forms.
            numa=numa_node(self._root, pci),
            speed=float(cores * clock) if cores and clock else None,
        )

    def _instances(self, nvml: Any, card: Device, handle: Any) -> tuple[Device, ...] | None:
        """Return the MIG instances of a card, or None if it is not in MIG mode."""
        mode = optional(nvml, nvml.nvmlDeviceGetMigMode, handle)
        if not mode or mode[0] != 1:
            return None
        found: list[Device] = []
        for index in range(optional(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            part = optional(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            uuid = optional(nvml, nvml.nvmlDeviceGetUUID, part) if part is not None else None
            if uuid is None:
                continue
            memory = optional(nvml, nvml.nvmlDeviceGetMemoryInfo, part)
            found.append(
                replace(
                    card,
                    id=uuid,
                    name=optional(nvml, nvml.nvmlDeviceGetName, part) or card.name,
                    memory=memory.total if memory else None,
                    memory_free=memory.free if memory else None,
                    parent=card.id,
                    speed=None,
                )
            )
        return tuple(found)


def _alike(devices: Sequence[Device]) -> bool:
    return len({(device.name, device.memory, device.capability) for device in devices}) < 2


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
