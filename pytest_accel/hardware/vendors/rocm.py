"""AMD GPUs, from the files of the kernel's drivers in sysfs; no ROCm library is loaded. Not tested on one.

``/sys/class/kfd/kfd/topology/nodes/N`` has ``gpu_id`` (0 for a CPU), ``properties``, ``mem_banks`` and ``io_links``
(kernel: ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``). ROCR counts the GPU nodes in this order. HIP may not keep it,
so masks name GPUs by id if they have one. ROCm's runtimes do not read ``CUDA_DEVICE_ORDER``. ``GPU_DEVICE_ORDINAL`` is
for OpenCL only.

``/sys/class/kfd/kfd/proc/PID/vram_GPUID`` has the bytes of a GPU's memory that a process uses (kernel:
``amdkfd/kfd_process.c``). ``ras/umc_err_count`` of its PCI device counts memory errors (``amdgpu_ras.c``: a line
``ue: N`` for uncorrectable ones). ``mem_info_vram_total`` and ``_used`` are in bytes. Whether a container sees the
processes of others, and under which pids, is unverified.

Masks are parsed like ROCR's ``core/runtime/amd_filter_device.cpp`` and clr's ``rocclr/device/rocm/rocdevice.cpp``
(snapshots of 2024-10).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_accel.core.device import Device, Link, MaskError, Near
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.health import Facts, Health, Process, judge, judge_all
from pytest_accel.hardware.sysfs import numa_node, read_number, read_text
from pytest_accel.hardware.vendors.base_vendor import BaseVendor, uuids_in_torch

_ROCR, _HIP, _CUDA = KINDS["rocm"].masks
_UUID = re.compile(r"GPU-[0-9a-f]{16}", re.ASCII)
_STRTOL = re.compile(r"0[xX][0-9a-fA-F]+|0[0-7]+|0|[1-9][0-9]*", re.ASCII)
_DECIMAL = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_DIGITS = 18
"""Maximum number of digits of an index, few enough for `int`."""
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

    facts = KINDS["rocm"]

    def __init__(self, root: Path = Path("/")) -> None:
        super().__init__(root)
        self._all: tuple[Device, ...] = ()
        self._gpus: dict[str, int] = {}

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


def condition(root: Path, pci: str | None) -> Facts:
    """Return the facts about the GPU at the address `pci`, without its processes; `root` contains ``sys``."""
    folder = root / "sys/bus/pci/devices" / (pci or "none")
    errors = _UNCORRECTED.search(read_text(folder / "ras/umc_err_count"))
    total, used = read_number(folder / "mem_info_vram_total"), read_number(folder / "mem_info_vram_used")
    return Facts(
        ecc_errors=int(errors[1]) if errors else 0,
        memory_used=used,
        memory_free=total - used if total is not None and used is not None else None,
    )


def processes(root: Path, gpu: int) -> tuple[Process, ...]:
    """Return the processes that use memory of the GPU with the ``gpu_id`` `gpu`."""
    found = (
        (int(folder.name), read_number(folder / f"vram_{gpu}"))
        for folder in (root / "sys/class/kfd/kfd/proc").glob("*")
        if folder.name.isdecimal()
    )
    return tuple(Process(pid, used) for pid, used in sorted(found) if used)


def read_rocr(text: str, ids: Sequence[str]) -> tuple[int, ...]:
    """Return what ``ROCR_VISIBLE_DEVICES=text`` leaves, as positions in `ids`, which are in KFD's node order.

    Indices (``strtol`` with base 0, blanks around them allowed) and ``GPU-`` ids (any case, 5 to 20 characters, a
    prefix of exactly one id) may be mixed. An entry that is invalid, out of range or a repetition ends the list; the
    entries before it count. The empty string leaves nothing.
    """
    chosen: list[int] = []
    for entry in text.split(","):
        token = entry.strip()
        if token.upper().startswith("GPU-"):
            fits = [at for at, name in enumerate(ids) if name.upper().startswith(token.upper())]
            at = fits[0] if len(fits) == 1 and 5 <= len(token) <= 20 else None
        else:
            at = _strtol(token)
        if at is None or at >= len(ids) or at in chosen:
            break
        chosen.append(at)
    return tuple(chosen)


def read_hip(text: str, ids: Sequence[str]) -> tuple[int, ...]:
    """Return what ``HIP_VISIBLE_DEVICES=text`` (or ``CUDA_``) leaves, as positions in `ids`, the devices left by ROCR.

    An index is a decimal number without blanks or leading zeros; an entry with ``GPU-`` means the first id that
    contains it, in the same case. A repetition is ignored; an entry that is invalid or out of range ends the list. The
    empty string leaves nothing.
    """
    chosen: list[int] = []
    for entry in text.split(","):
        if "GPU-" in entry:
            at = next((at for at, name in enumerate(ids) if entry in name), None)
        else:
            at = int(entry) if _DECIMAL.fullmatch(entry) and len(entry) <= _DIGITS else None
        if at is None or at >= len(ids):
            break
        if at not in chosen:
            chosen.append(at)
    return tuple(chosen)


def _strtol(token: str) -> int | None:
    if not _STRTOL.fullmatch(token) or len(token) > _DIGITS:
        return None
    octal = len(token) > 1 and token[0] == "0" and token[1] not in "xX"
    return int(token, 8 if octal else 0)
