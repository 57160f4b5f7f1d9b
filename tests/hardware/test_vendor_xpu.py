"""Tests of the kind `xpu` (Intel GPUs), with fake files of sysfs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.vendors.xpu import Xpu, address_in
from tests.hardware.conftest import Run

AFFINITY, SELECTOR = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"
PCI_ORDER, HIERARCHY = "ZE_ENABLE_PCI_ID_DEVICE_ORDER", "ZE_FLAT_DEVICE_HIERARCHY"
IRIS, MAX, ARC, DG1 = "0000:00:02.0", "0000:18:00.0", "0000:2a:00.0", "0001:03:00.0"


def _xpu(root: Path = Path("/")) -> Xpu:
    return Xpu(KINDS["xpu"], root=root)


def _gpu(root: Path, number: int, address: str, product: str, *tiles: str, node: bool = True) -> Path:
    """Write the files of a card in sysfs; return the folder of its PCI device."""
    pci, render = root / "sys/bus/pci/devices" / address, f"renderD{128 + number}"
    pci.mkdir(parents=True)
    (root / "sys/class/drm" / render).mkdir(parents=True)
    (root / "sys/class/drm" / render / "device").symlink_to(pci)
    (pci / "vendor").write_text("0x8086\n")
    (pci / "device").write_text(f"{product}\n")
    (pci / "numa_node").write_text("1\n" if address == ARC else "-1\n")
    for tile, size in enumerate(tiles):
        (pci / f"tile{tile}").mkdir()
        (pci / f"tile{tile}/physical_vram_size_bytes").write_text(f"{size}\n")
    (root / "dev/dri").mkdir(parents=True, exist_ok=True)
    if node:
        (root / "dev/dri" / render).touch()
    return pci


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a machine with an integrated GPU, a card with two tiles, and a card each for the drivers xe and i915."""
    root = tmp_path_factory.mktemp("xpu")
    _gpu(root, 2, IRIS, "0x46a6")
    _gpu(root, 10, MAX, "0x0bd5", "64000", "64000")
    _gpu(root, 1, ARC, "0x56a0", "16000")
    _gpu(root, 0, DG1, "0x4905")
    for other in ("card1", "card1-DP-1", "version"):
        (root / "sys/class/drm" / other).mkdir()
    return root


def _ids(devices: tuple[Device, ...]) -> list[str]:
    return [device.id for device in devices]


def test_gpus_are_described_and_numbered_in_pci_order_without_an_integrated_gpu_beside_them(machine: Path) -> None:
    vendor = _xpu(machine)
    devices = vendor.discover()
    assert devices == (
        Device("xpu", MAX, 0, "Intel GPU 0bd5", 128000, pci=MAX),
        Device("xpu", ARC, 1, "Intel GPU 56a0", 16000, pci=ARC, numa=1),
        Device("xpu", DG1, 2, "Intel GPU 4905", pci=DG1),
    )
    assert vendor.notes == (f"{IRIS} is left out: it is integrated, and there are discrete GPUs",)
    assert vendor.fastest(devices) == devices


def test_an_integrated_gpu_alone_is_a_device(tmp_path: Path) -> None:
    _gpu(tmp_path, 0, IRIS, "0x46a6")
    assert _xpu(tmp_path).discover() == (Device("xpu", IRIS, 0, "Intel GPU 46a6", pci=IRIS),)


def test_a_machine_without_intel_gpus_has_none(tmp_path: Path) -> None:
    assert _xpu(tmp_path).discover() == ()
    (_gpu(tmp_path, 0, ARC, "0x1002") / "vendor").write_text("0x1002\n")
    vendor = _xpu(tmp_path)
    assert (vendor.discover(), vendor.notes) == ((), ())


def test_figures_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    folder = _gpu(tmp_path, 0, ARC, "Arc", "16G")
    (folder / "numa_node").write_text("one")
    assert _xpu(tmp_path).discover() == (Device("xpu", ARC, 0, "Intel GPU 0000", pci=ARC),)


def test_gpus_that_the_driver_cannot_open_are_left_out(tmp_path: Path) -> None:
    """In a container, sysfs shows every GPU, but ``/dev/dri`` only those that the container was given."""
    _gpu(tmp_path, 0, MAX, "0x56a0", node=False)
    _gpu(tmp_path, 1, ARC, "0x56a0")
    vendor = _xpu(tmp_path)
    assert [(device.id, device.index) for device in vendor.discover()] == [(ARC, 0)]
    assert vendor.notes == (f"{MAX} is left out: this process cannot open its render node dev/dri/renderD128",)


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        ({}, [MAX, ARC, DG1]),
        ({AFFINITY: ""}, [MAX, ARC, DG1]),
        ({AFFINITY: "default"}, [MAX, ARC, DG1]),
        ({AFFINITY: "2,0", HIERARCHY: "COMPOSITE"}, [MAX, DG1]),
        ({AFFINITY: "-1", HIERARCHY: "COMPOSITE"}, []),
    ],
)
def test_a_list_of_whole_cards_is_read_without_torch(
    machine: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], left: list[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "absent")
    vendor = _xpu(machine)
    assert _ids(vendor.visible(vendor.discover(), environ)) == left


def test_masks_and_torch_devices_count_in_the_order_of_the_driver(machine: Path) -> None:
    vendor = _xpu(machine)
    max_gpu, arc, dg1 = vendor.discover()
    assert vendor.mask((dg1, max_gpu), {AFFINITY: "9", SELECTOR: "*:*"}) == {
        AFFINITY: "0,2", HIERARCHY: "COMPOSITE", PCI_ORDER: None, SELECTOR: None,
    }  # fmt: skip
    assert vendor.torch_devices((dg1, max_gpu, arc)) == ("xpu:2", "xpu:0", "xpu:1")
    assert vendor.mask((), {})[AFFINITY] == "-1"


def test_the_pci_address_is_read_from_a_uuid_in_the_format_of_the_driver() -> None:
    # The UUID that xpu-smi shows for the card at 0000:17:00.0, with its bytes in reverse order.
    uuid = bytes.fromhex("000000000000001700000000e2118086")[::-1]
    assert address_in(uuid) == "0000:17:00.0"
    assert address_in(bytes.fromhex("8680d50b2f000100031f020000000001")) == "0001:03:1f.2"
    for other in (b"", b"\x86\x80", bytes(16), bytes.fromhex("8680d50b2f000100031f020100000001")):
        assert address_in(other) is None


FAKE_TORCH = """
from types import SimpleNamespace
import os
import sys

class Properties:
    def __init__(self, uuid):
        if uuid:
            self.uuid = SimpleNamespace(bytes=list(bytes.fromhex(uuid)))

ready = False

def init():
    global ready
    ready = True

def device_count():
    uuids = os.environ["UUIDS"].split()
    return len(uuids) if ready or not uuids else 9

def get_device_properties(index):
    return Properties(os.environ["UUIDS"].split()[index].removeprefix("-"))

xpu = sys.modules[__name__]
"""


@pytest.mark.parametrize(
    ("build", "uuids", "output"),
    [
        ("xpu", "8680d50b2f0000001800000000000000 8680a056080000002a00000000000000", "fine"),
        ("xpu", "- 8680a056080000002a00000000000000", "fine"),
        ("xpu", "8680a056080000002a00000000000000 -", f"({MAX}, {ARC}) but sees 2 ({ARC}, ?); environment: no mask"),
        ("xpu", "8680d50b2f0000001800000000000000", f"({MAX}, {ARC}) but sees 1 ({MAX}); environment: no mask"),
        ("cuda", "", "but sees 0 (none); environment: no mask; torch is not built for XPU"),
    ],
)
def test_verification_compares_the_uuids_that_torch_gives(run: Run, build: str, uuids: str, output: str) -> None:
    """The fake torch answers as torch does on Intel GPUs, but gives a wrong device count before `init`."""
    files = {"torch/__init__.py": FAKE_TORCH, "torch/version.py": f"{build}: Optional[str] = '20250301'\n"}
    code = f"""
from pytest_accel.core.device import Device, MaskError
from pytest_accel.hardware.registry import make_vendor
try:
    make_vendor("xpu").verify([Device("xpu", "{ARC}", 1, "Arc"), Device("xpu", "{MAX}", 0, "Max")], {{}})
    print("fine")
except MaskError as error:
    print(error)
"""
    assert run(code, files, UUIDS=uuids)[-1].endswith(output)


@pytest.mark.parametrize(
    "environ",
    [
        {AFFINITY: "0"},  # Numbers may be those of tiles.
        {AFFINITY: "0.1", HIERARCHY: "COMPOSITE"},
        {AFFINITY: "0,9", HIERARCHY: "COMPOSITE"},
        {AFFINITY: "0", HIERARCHY: "COMPOSITE", PCI_ORDER: "1"},
        {SELECTOR: "level_zero:2"},
        {"SYCL_DEVICE_ALLOWLIST": "DeviceName:{{.*}}"},
    ],
)
def test_torch_is_asked_for_the_meaning_of_other_masks(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    vendor = _xpu(machine)
    devices = vendor.discover()
    # torch sees a card once for each of its tiles.
    uuids = "86800549000001000300000000000000 8680d50b2f0000001800000000000000 8680d50b2f0000001800000000000001"
    assert _ids(vendor.visible(devices, {**environ, "UUIDS": uuids})) == [DG1, MAX]
