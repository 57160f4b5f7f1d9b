"""Tests of the kinds whose devices are numbered nodes, with fake nodes and fake files of sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.core.device import Device, MaskError
from pytest_accel.core.kinds import KINDS, KindFacts
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.hardware.vendors.numbered import Neuron, NumberedVendor, Tpu


def _node(root: Path, name: str, pci: str = "", entry: str = "", **files: str) -> None:
    """Create the node `name` in ``dev``. Write `files` to the PCI device `pci`, or to `entry` in ``sys/class``.

    `entry` leads to the PCI device. In the names of files, ``__`` is a slash.
    """
    (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
    (root / "dev" / name).touch()
    folder = root / (f"sys/bus/pci/devices/{pci}" if pci else f"sys/class/{entry}")
    for file, text in files.items():
        path = folder / file.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    if pci and entry:
        (root / "sys" / entry).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys" / entry).symlink_to(folder)


def _gaudi(root: Path, number: int, bus: int, **files: str) -> None:
    entry = f"class/accel/accel{number}"
    (root / "sys" / entry).mkdir(parents=True)
    _node(root, f"accel/accel{number}", f"0000:{bus:02x}:00.0", f"{entry}/device", **files)


def _chip(root: Path, node: str, bus: int, vendor: str = "0x1ae0") -> None:
    group = root / f"sys/kernel/iommu_groups/{node.rpartition('/')[2]}/devices"
    group.mkdir(parents=True, exist_ok=True)
    entry = str((group / str(bus)).relative_to(root / "sys"))
    _node(root, node, f"0000:{bus:02x}:00.0", entry, vendor=vendor, device="0x0063", numa_node="1")


def _found(vendor: NumberedVendor) -> list[tuple[str, int, str, bool]]:
    return [(device.id, device.index, device.name, device.single_process) for device in vendor.discover()]


@pytest.mark.parametrize(
    ("facts", "names", "title"),
    [
        (KINDS["npu"], ("davinci6", "davinci10"), "Ascend NPU"),
        (KINDS["mlu"], ("cambricon_dev6", "cambricon_dev10"), "Cambricon MLU"),
        (KINDS["musa"], ("mtgpu.6", "mtgpu.10"), "Moore Threads GPU"),
        (KINDS["musa"], ("mtgpu6", "mtgpu10"), "Moore Threads GPU"),
        # A kind like these is one row.
        (KindFacts("acme", ("ACME",), nodes=("acme([0-9]+)",), title="Acme"), ("acme6", "acme10"), "Acme"),
    ],
)
def test_each_node_is_a_device_and_its_position_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: KindFacts, names: tuple[str, ...], title: str
) -> None:
    for name in ("davinci_manager", "hisi_hdc", "cambricon_ctl", "mtgpu", "mtgpuctl", "davinci5/x", *names):
        _node(tmp_path, name)
    monkeypatch.setitem(KINDS, facts.name, facts)
    vendor, kind = NumberedVendor(facts, root=tmp_path), facts.name
    assert type(make_vendor(kind)) is NumberedVendor
    assert vendor.discover() == (Device(kind, f"{kind}-6", 0, title), Device(kind, f"{kind}-10", 1, title))
    assert NumberedVendor(facts, root=tmp_path / "absent").discover() == ()


def test_a_pci_address_is_the_id_only_if_it_is_unique(tmp_path: Path) -> None:
    for number, address in enumerate(("0000:c1:00.0", "0000:81:00.0", "0000:81:00.0", "elsewhere")):
        entry = f"class/{'misc' if number == 1 else 'devdrv'}/davinci{number}"
        _node(tmp_path, f"davinci{number}", address, f"{entry}/device", numa_node="2")
    vendor = NumberedVendor(KINDS["npu"], root=tmp_path)
    devices = vendor.discover()
    assert [(device.id, device.index, device.numa) for device in devices] == [
        ("npu-1", 1, 2),
        ("npu-2", 2, 2),
        ("0000:c1:00.0", 0, 2),
        ("npu-3", 3, None),
    ]
    assert vendor.mask(devices, {}) == {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}
    assert vendor.torch_devices(devices) == ("npu:1", "npu:2", "npu:0", "npu:3")


def test_gaudis_have_their_module_id_as_number(tmp_path: Path) -> None:
    for number, module in enumerate((2, 0, 3)):
        _gaudi(tmp_path, number, 0x1A + number, vendor="0x1da3", module_id=f"{module}", device_type="GAUDI2")
    _gaudi(tmp_path, 3, 0x1D, vendor="0x8086")
    _gaudi(tmp_path, 4, 0x1E, vendor="0x1da3")
    _node(tmp_path, "accel/accel5", entry="accel/accel5/device", module_id="5")
    _node(tmp_path, "accel/accel_controlD5")
    vendor = NumberedVendor(KINDS["hpu"], root=tmp_path)
    assert _found(vendor) == [
        ("0000:1a:00.0", 2, "Intel GAUDI2", True),
        ("0000:1b:00.0", 0, "Intel GAUDI2", True),
        ("0000:1c:00.0", 3, "Intel GAUDI2", True),
        ("hpu-5", 5, "Intel Gaudi", True),
    ]
    assert vendor.notes == ("accel4 is left out: its driver does not report the number that masks need",)
    devices = vendor.discover()
    several, single = vendor.mask_variables
    assert vendor.mask(devices[2:3], {}) == {several: "3", single: "3"}
    assert vendor.mask(devices[:2], {single: "3"}) == {several: "2,0", single: None}
    assert vendor.torch_devices(devices[:2]) == ("hpu:0", "hpu:1")


def test_a_gaudi_rank_compares_the_modules_of_its_mask_and_accepts_a_larger_count() -> None:
    vendor = NumberedVendor(KINDS["hpu"])
    devices = [Device("hpu", f"hpu-{module}", module, "Intel Gaudi") for module in (2, 0)]
    vendor.compare(devices, [f"hpu:{index}" for index in range(8)], {})
    with pytest.raises(MaskError, match=r"2 hpu devices .* sees 1 \(hpu:0\)"):
        vendor.compare(devices, ["hpu:0"], {})
    for text in ("0,2", "2,0,5", ""):
        has = f"should have HABANA_VISIBLE_MODULES='2,0'; environment: HABANA_VISIBLE_MODULES='{text}'"
        with pytest.raises(MaskError, match=has):
            vendor.verify(devices, {"HABANA_VISIBLE_MODULES": text})


def test_chips_are_found_by_the_nodes_of_iommu_groups(tmp_path: Path) -> None:
    _node(tmp_path, "vfio/vfio")
    _chip(tmp_path, "vfio/12", 0x10)
    _chip(tmp_path, "vfio/7", 0x11)
    _chip(tmp_path, "vfio/99", 0x01, vendor="0x8086")
    _chip(tmp_path, "accel/accel0", 0x02, vendor="0x1022")
    assert _found(Tpu(KINDS["tpu"], root=tmp_path)) == [
        ("0000:10:00.0", 1, "TPU v5e", True),
        ("0000:11:00.0", 0, "TPU v5e", True),
    ]


def test_chips_are_found_by_the_nodes_of_googles_own_driver(tmp_path: Path) -> None:
    (tmp_path / "dev/accel").mkdir(parents=True)
    _node(tmp_path, "accel1")
    _node(tmp_path, "accel3")
    assert _found(Tpu(KINDS["tpu"], root=tmp_path)) == [
        ("tpu-1", 0, "Google TPU", True),
        ("tpu-3", 1, "Google TPU", True),
    ]


@pytest.mark.parametrize(("count", "shape"), [(1, "1,1,1"), (2, "1,2,1"), (3, None), (4, "2,2,1"), (8, "2,4,1")])
def test_the_mask_sets_the_shape_of_the_chosen_chips(count: int, shape: str | None) -> None:
    chips = [Device("tpu", f"tpu-{number}", number, "TPU v5e") for number in reversed(range(count))]
    one_process = None if shape is None else "1,1,1"
    assert Tpu(KINDS["tpu"]).mask(chips, {"TPU_VISIBLE_CHIPS": "7"}) == {
        "PJRT_DEVICE": "TPU",
        "TPU_VISIBLE_CHIPS": ",".join(map(str, range(count))),
        "TPU_VISIBLE_DEVICES": None,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": shape,
        "TPU_CHIPS_PER_HOST_BOUNDS": shape,
        "TPU_PROCESS_BOUNDS": one_process,
        "TPU_HOST_BOUNDS": one_process,
    }


@pytest.mark.parametrize(
    ("model", "environ", "cores"),
    [
        ("Trainium1", {}, "0123"),
        ("Trainium2", {}, "02"),
        ("Trainium2", {"NEURON_LOGICAL_NC_CONFIG": "1"}, "0123"),
        ("Trainium2", {"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, "0123"),
        ("Trainium2", {"NEURON_LOGICAL_NC_CONFIG": "x"}, "02"),
    ],
)
def test_each_core_that_the_runtime_counts_is_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, environ: dict[str, str], cores: str
) -> None:
    for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    for card in (2, 10):
        files = {"core_count": "4", "info__architecture__device_name": model}
        _node(tmp_path, f"neuron{card}", entry=f"neuron_device/neuron{card}", **files)
    _node(tmp_path, "neuron11", entry="neuron_device/neuron11", neuron_core0__x="", neuron_core1__x="")
    _node(tmp_path, "neuron12")
    vendor = Neuron(KINDS["neuron"], root=tmp_path)
    ids = [*(f"neuron-{card}.{core}" for card in (2, 10) for core in cores), "neuron-11.0", "neuron-11.1"]
    names = [f"AWS {model}"] * 2 * len(cores) + ["AWS NeuronCore"] * 2
    assert _found(vendor) == [(name, index, names[index], True) for index, name in enumerate(ids)]
    assert vendor.notes == ("neuron-12 is left out: sysfs does not have its number of cores",)
