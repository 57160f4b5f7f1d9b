"""AMD GPUs, from the topology of the kernel's compute driver (KFD) in sysfs; no ROCm library is loaded.

``/sys/class/kfd/kfd/topology/nodes/N`` has ``gpu_id`` (0 for a CPU), ``properties``, ``mem_banks`` and ``io_links``
(kernel: ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``). ROCR counts the GPU nodes in this order. HIP may not keep it,
so masks name GPUs by id if they have one. ROCm's runtimes do not read ``CUDA_DEVICE_ORDER``. ``GPU_DEVICE_ORDINAL`` is
for OpenCL only. This module has not been tested on an AMD GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_accel.core.device import Device, Link, MaskError, Near
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.health import Health, judge
from pytest_accel.hardware.processes import judge_all
from pytest_accel.hardware.sysfs import numa_node, read_number, read_text
from pytest_accel.hardware.torch_build import lacks
from pytest_accel.hardware.vendors.base_vendor import BaseVendor, uuids_in_torch
from pytest_accel.hardware.vendors.rocm_health import condition, processes
from pytest_accel.hardware.vendors.rocm_mask import read_hip, read_rocr

_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
_UUID = re.compile(r"GPU-[0-9a-f]{16}", re.ASCII)
# CRAT_IOLINK_TYPE_PCIEXPRESS and CRAT_IOLINK_TYPE_XGMI in the kernel's kfd_crat.h.
_LINKS: dict[int, Near] = {2: "pcie", 11: "nvlink"}
# HSA_MEM_HEAP_TYPE_FB_PUBLIC and _FB_PRIVATE in kfd_topology.h: the GPU's own memory.
_OWN_MEMORY = (1, 2)


class Rocm(BaseVendor):
    """The vendor of kind ``rocm``; a device's id is ``GPU-`` and its 16 digits, else its PCI address.

    An XGMI link is reported as ``nvlink``, the name by which tests ask for a direct link between two GPUs. torch for
    ROCm keeps CUDA's name of the devices.
    """

    kind = "rocm"
    mask_variables: tuple[str, ...] = (_ROCR, _HIP, _CUDA)
    torch_type = "cuda"

    def __init__(self, root: Path = Path("/")) -> None:
        super().__init__(root)
        self._all: tuple[Device, ...] = ()
        self._gpus: dict[str, int] = {}

    def lacking(self) -> str | None:
        """Return a text if torch is not built for ROCm, else None.

        KFD also lists the integrated graphics of AMD processors, which other builds of torch cannot use.
        """
        return lacks("hip", "ROCm", self.kind)

    def discover(self) -> tuple[Device, ...]:
        """Return every GPU, in PCI order; its index is ROCR's.

        GPUs that the device cgroup denies (which ROCR leaves out too) or that are sick (`judge`) are left out, with a
        line in `notes`.
        """
        nodes = self._root / "sys/class/kfd/kfd/topology/nodes"
        found: dict[int, Device] = {}
        self._gpus = {}
        notes: list[str] = []
        for node in sorted(int(folder.name) for folder in nodes.glob("*") if folder.name.isdecimal()):
            try:
                gpu = int((nodes / str(node) / "gpu_id").read_text(encoding="utf-8"))
                if gpu != 0:
                    found[node] = self._describe(nodes / str(node), list(found.values()))
                    self._gpus[found[node].id] = gpu
            except (OSError, ValueError) as error:
                notes.append(f"KFD node {node} is left out: {error}")
        ids = {node: device.id for node, device in found.items()}
        self._all = tuple(replace(device, links=_links(nodes / str(node), ids)) for node, device in found.items())
        # A sick GPU still counts in ROCR's indices.
        sick = {device.id: judge(condition(self._root, device.pci)) for device in self._all}
        sick = {name: health for name, health in sick.items() if health.state == "sick"}
        notes += [f"{one.name} ({one.id}) is left out: {sick[one.id].reason}" for one in self._all if one.id in sick]
        self.notes = tuple(notes)
        return by_pci([device for device in self._all if device.id not in sick])

    def health(self, devices: Sequence[Device], session: int | None = None) -> Mapping[str, Health]:
        """See `HealthVendor.health`."""
        facts = {
            device.id: replace(
                condition(self._root, device.pci), processes=processes(self._root, self._gpus.get(device.id, 0))
            )
            for device in devices
        }
        return judge_all(facts, session)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that both ROCR's and HIP's mask leave; CUDA's is read only if HIP's is not set at all."""
        hip = environ.get(_HIP, environ.get(_CUDA))
        if hip is None and _ROCR not in environ:
            return tuple(devices)
        seen = self._left_by_rocr(devices, environ)
        if hip is not None:
            seen = tuple(seen[at] for at in read_hip(hip, [device.id for device in seen]))
        return tuple(device for device in seen if device in devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return one layer of masks: ROCR's with ids, or, if ROCR's is inherited, HIP's with indices into its devices.

        All devices are hidden by ``HIP_VISIBLE_DEVICES=-1``, since torch counts one device for an empty
        ``ROCR_VISIBLE_DEVICES``. Raises MaskError if an inherited ROCR mask hides one of `devices`.
        """
        if not devices:
            return {_HIP: "-1", _CUDA: None}
        if _ROCR not in environ:
            names = [device.id if _UUID.fullmatch(device.id) else str(device.index) for device in devices]
            return {_ROCR: ",".join(names), _HIP: None, _CUDA: None}
        left = [device.id for device in self._left_by_rocr(devices, environ)]
        hidden = [device.id for device in devices if device.id not in left]
        if hidden:
            raise MaskError(
                f"{_ROCR}={environ[_ROCR]!r} hides {', '.join(hidden)}; it leaves {', '.join(left) or 'none'}"
            )
        return {_HIP: ",".join(str(left.index(device.id)) for device in devices), _CUDA: None}

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        import torch

        reason = "" if torch.version.hip else "; this torch was built without ROCm"
        self.compare(devices, uuids_in_torch(), environ, reason)

    def is_same(self, device: Device, seen: str) -> bool:
        # UUIDs and ids of another form cannot be compared.
        return _unique_id(seen) in (None, device.id) or not _UUID.fullmatch(device.id)

    def _left_by_rocr(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        # The vendor object of a rank has not discovered the devices yet, and ROCR counts more than the leased ones.
        if not self._all:
            self.discover()
        every = self._all or tuple(sorted(devices, key=lambda device: device.index))
        text = environ.get(_ROCR)
        return every if text is None else tuple(every[at] for at in read_rocr(text, [device.id for device in every]))

    def _describe(self, node: Path, others: Sequence[Device]) -> Device:
        facts = _properties(node / "properties")
        location, version = facts.get("location_id", 0), facts.get("gfx_target_version", 0)
        pci = f"{facts.get('domain', 0):04x}:{location >> 8 & 255:02x}:{location >> 3 & 31:02x}.{location & 7}"
        unique = facts.get("unique_id", 0)
        name = f"GPU-{unique:016x}" if unique else pci
        if any(device.id == name for device in others):
            # Partitions of one card share its address, and may share its id.
            name = f"{pci}/{len(others)}"
        banks = [_properties(bank) for bank in node.glob("mem_banks/*/properties")]
        memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _OWN_MEMORY)
        gfx = (version // 10000, version // 100 % 100, version % 100)
        folder = self._root / "sys/bus/pci/devices" / pci
        own = condition(self._root, pci)
        work = facts.get("simd_count", 0) * facts.get("max_engine_clk_fcompute", 0)
        return Device(
            kind=self.kind,
            id=name,
            index=len(others),
            name=read_text(folder / "product_name") or f"AMD gfx{gfx[0]}{gfx[1]:x}{gfx[2]:x}",
            memory=memory or read_number(folder / "mem_info_vram_total"),
            memory_free=own.memory_free,
            capability=gfx if version else None,
            pci=pci,
            numa=numa_node(self._root, pci),
            speed=float(work) or None,
        )


make = Rocm.make


def _unique_id(uuid: str) -> str | None:
    """Return the id in a UUID of torch's, or None if it has another form.

    HIP's 16 bytes are the 16 digits of the id as text, which torch prints in hexadecimal (unverified).
    """
    try:
        text = bytes.fromhex(uuid.replace("-", "")).decode("ascii").lower()
    except ValueError:
        return None
    return f"GPU-{text}" if _UUID.fullmatch(f"GPU-{text}") else None


def _links(node: Path, ids: Mapping[int, str]) -> tuple[Link, ...]:
    links: list[Link] = []
    # Links between GPUs without a host bridge between them are in a folder of their own since Linux 5.19.
    for file in sorted((*node.glob("io_links/*/properties"), *node.glob("p2p_links/*/properties"))):
        try:
            facts = _properties(file)
        except OSError:
            continue  # The device cgroup also denies the links to devices that it denies.
        peer, via = ids.get(facts.get("node_to", -1)), _LINKS.get(facts.get("type", 0))
        if peer and via and Link(peer, via) not in links:
            links.append(Link(peer, via))
    return tuple(links)


def _properties(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
