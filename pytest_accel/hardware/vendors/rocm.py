"""AMD GPUs, from the files of the kernel's drivers in sysfs; no ROCm library is loaded.

``/sys/class/kfd/kfd/topology/nodes/N`` has ``gpu_id`` (0 for a CPU), ``properties``, ``mem_banks`` and ``io_links``
(kernel: ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``). ROCR counts the GPU nodes in this order. HIP may not keep it,
so masks name GPUs by id if they have one. ROCm's runtimes do not read ``CUDA_DEVICE_ORDER``. ``GPU_DEVICE_ORDINAL`` is
for OpenCL only.

``/sys/class/kfd/kfd/proc/PID/vram_GPUID`` has the bytes of a GPU's memory that a process uses (kernel:
``amdkfd/kfd_process.c``). ``ras/umc_err_count`` of its PCI device counts memory errors (``amdgpu_ras.c``: a line
``ue: N`` for uncorrectable ones). ``mem_info_vram_total`` and ``_used`` are in bytes. Whether a container sees the
processes of others, and under which pids, is unverified. This module has not been tested on an AMD GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pytest_accel.core.device import Device, Link, Near
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.health import Facts, Health, judge, judge_all
from pytest_accel.hardware.kernel_files import numa_node, read_number, read_text
from pytest_accel.hardware.masks import read_devices
from pytest_accel.hardware.vendors.base_vendor import BaseVendor, uuids_in_torch

_ROCR, _HIP, _CUDA = KINDS["rocm"].masks
_UUID = re.compile(r"GPU-[0-9a-f]{16}", re.ASCII)
_UNCORRECTED = re.compile(r"^ue: ([0-9]+)$", re.MULTILINE | re.ASCII)
# CRAT_IOLINK_TYPE_PCIEXPRESS and CRAT_IOLINK_TYPE_XGMI in the kernel's kfd_crat.h.
_LINKS: dict[int, Near] = {2: "pcie", 11: "nvlink"}
# HSA_MEM_HEAP_TYPE_FB_PUBLIC and _FB_PRIVATE in kfd_topology.h: the GPU's own memory.
_OWN_MEMORY = (1, 2)


class Rocm(BaseVendor):
    """The vendor of kind ``rocm``; a device's id is ``GPU-`` and its 16 digits, else its PCI address.

    An XGMI link is reported as ``nvlink``, the name by which tests ask for a direct link between two GPUs. torch for
    ROCm keeps CUDA's name of the devices.
    """

    _gpus: Mapping[str, int] = MappingProxyType({})
    """KFD's number (``gpu_id``) of each device, by its id."""

    def discover(self) -> tuple[Device, ...]:
        """Return every GPU, in PCI order; its index is ROCR's.

        GPUs that the device cgroup denies (which ROCR leaves out too) or that are sick (`judge`) are left out, with a
        line in `notes`.
        """
        nodes = self._root / "sys/class/kfd/kfd/topology/nodes"
        found: dict[int, Device] = {}
        self.notes, gpus = (), dict[str, int]()
        for node in sorted(int(folder.name) for folder in nodes.glob("*") if folder.name.isdecimal()):
            try:
                gpu = int((nodes / str(node) / "gpu_id").read_text(encoding="utf-8"))
                if gpu != 0:
                    found[node] = self._describe(nodes / str(node), list(found.values()))
                    gpus[found[node].id] = gpu
            except (OSError, ValueError) as error:
                self.note(f"KFD node {node} is left out: {error}")
        self._gpus = gpus
        ids = {node: device.id for node, device in found.items()}
        usable: list[Device] = []
        for node, device in found.items():
            health = judge(self._condition(device))
            if health.state == "sick":  # It still counts in ROCR's indices.
                self.note(f"{device.name} ({device.id}) is left out: {health.reason}")
            else:
                links = _links(nodes / str(node), ids)
                usable.append(replace(device, memory_free=health.memory_free, links=links))
        return by_pci(usable)

    def health(self, devices: Sequence[Device], session: int | None = None) -> Mapping[str, Health]:
        """See `HealthVendor.health`."""
        return judge_all({device.id: self._condition(device) for device in devices}, session)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that the masks leave; CUDA's mask is read only if HIP's is not set at all.

        A single list of whole ids and numbers is read here; for anything else, torch is asked in a short process.
        """
        names = (_ROCR, _HIP if _HIP in environ else _CUDA)
        lists = [read_devices(environ[name], devices) for name in names if name in environ]
        if not lists:
            return tuple(devices)
        if () in lists:
            return ()
        return lists[0] if len(lists) == 1 and lists[0] is not None else self.ask(devices, environ)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return ROCR's mask alone, with ids, or ROCR's numbers for GPUs without an id."""
        if not devices:  # torch counts one device for an empty ``ROCR_VISIBLE_DEVICES``.
            return {_HIP: "-1", _CUDA: None}
        names = [device.id if _UUID.fullmatch(device.id) else str(device.index) for device in devices]
        return {_ROCR: ",".join(names), _HIP: None, _CUDA: None}

    def seen(self, environ: Mapping[str, str]) -> list[str]:
        return [_unique_id(uuid) for uuid in uuids_in_torch()]

    def is_same(self, device: Device, seen: str) -> bool:
        # Ids of another form cannot be compared.
        return seen in ("?", device.id) or not _UUID.fullmatch(device.id)

    def _condition(self, device: Device) -> Facts:
        folder = self._root / "sys/bus/pci/devices" / (device.pci or "none")
        errors = _UNCORRECTED.search(read_text(folder / "ras/umc_err_count"))
        total, used = read_number(folder / "mem_info_vram_total"), read_number(folder / "mem_info_vram_used")
        files = (self._root / "sys/class/kfd/kfd/proc").glob(f"[0-9]*/vram_{self._gpus.get(device.id)}")
        users = sorted((int(file.parent.name), read_number(file)) for file in files)
        return Facts(
            processes={pid: size for pid, size in users if size},
            ecc_errors=int(errors[1]) if errors else 0,
            memory_used=used,
            memory_free=total - used if total is not None and used is not None else None,
        )

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
        work = facts.get("simd_count", 0) * facts.get("max_engine_clk_fcompute", 0)
        return Device(
            kind=self.kind,
            id=name,
            index=len(others),
            name=read_text(folder / "product_name") or f"AMD gfx{gfx[0]}{gfx[1]:x}{gfx[2]:x}",
            memory=memory or read_number(folder / "mem_info_vram_total"),
            capability=gfx if version else None,
            pci=pci,
            numa=numa_node(self._root, pci),
            speed=float(work) or None,
        )


def _unique_id(uuid: str) -> str:
    """Return the id in a UUID of torch's; ``?`` if it has another form.

    HIP's 16 bytes are the 16 digits of the id as text, which torch prints in hexadecimal (unverified).
    """
    try:
        name = f"GPU-{bytes.fromhex(uuid.replace('-', '')).decode('ascii').lower()}"
    except ValueError:
        return "?"
    return name if _UUID.fullmatch(name) else "?"


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
