"""The kinds of accelerator: this package's own, in a table, and the kinds that other packages publish.

A package publishes a kind as an entry point of the group ``pytest_accel.vendors``. Its name is the kind. Its value is a
callable that takes the text after the colon of ``--accel`` (None if there is none) and returns the
:class:`~pytest_accel.core.device.Vendor`, or raises ValueError if the text is not allowed.

The table is here, and not beside the vendors, since marks and options need the names of the kinds, and the fork server
their names in torch. None of these may load every vendor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, NamedTuple

GROUP = "pytest_accel.vendors"
PJRT_DEVICE = "PJRT_DEVICE"
"""The variable by which torch_xla chooses a runtime. Some kinds have it as their last mask variable."""


class KindFacts(NamedTuple):
    """All facts about a kind of this package that need no code: a row of `KINDS`."""

    name: str
    """The name in ``--accel`` and in marks."""
    masks: tuple[str, ...] = ()
    """Every environment variable that restricts which devices a process sees, outermost layer first."""
    shown: tuple[str, ...] = ()
    """First characters of other variables that error messages about masks show."""
    hardware: bool = True
    """False if ``auto`` never selects the kind. ``--accel`` may then have text after the kind and a colon."""
    ranks: bool = True
    """False if no process group accepts tensors of this kind."""
    backend: str | None = None
    """Backend of process groups; None for torch's default."""
    package: str | None = None
    """Top-level package that adds the kind to torch, imported in ranks only; None if torch needs none."""
    imports: tuple[str, ...] = ()
    """Further modules that a rank imports, for example because they register the backend."""
    counter: str = ""
    """Function that counts the devices, as ``module:name``; empty: `device_count` of the kind's module of torch."""
    sees_all: bool = False
    """True if a process may count more devices than its mask shows."""
    build: tuple[str, str] | None = None
    """Platform that torch must be built for, in ``torch/version.py`` and for people; None if any build will do.

    The drivers of AMD and Intel also list the graphics of their processors, which other builds of torch cannot use.
    """
    torch: str = ""
    """Type of the devices in torch, if it is not the name of the kind."""
    torch_index: Literal["mask", "ascending"] | None = "ascending"
    """torch's index of a device: its position in the mask or in ascending order of `Device.index`; or None.

    Masks whose order does not count, or is not known to count, are written in ascending order, so "ascending" is right
    whether or not the runtime keeps the order of a mask.
    """
    vendor: str = "numbered:NumberedVendor"
    """Class of the vendor, as ``module:name`` in ``hardware/vendors``."""
    # Columns of the kinds without modules of their own: nodes under /dev, and a mask that lists their numbers.
    title: str = ""
    """Name of the devices for users; its first word is the maker."""
    nodes: tuple[str, ...] = ()
    """Patterns of the paths under ``/dev``; the first group is the number."""
    maker: int | None = None
    """PCI vendor, if others have nodes with the same names."""
    models: Mapping[int, str] | None = None
    """Names of the devices for users by PCI device id, in place of `title`."""
    number: str = ""
    """File of a node in sysfs with the number that masks list; empty: the position of the node."""
    model: str = ""
    """File of a node in sysfs with the name of its model, which follows the maker in place of `title`."""
    single_process: bool = False
    """True if only one process at a time can use a device."""
    single: str = ""
    """Mask variable that is set only in a process with a single device, to its number."""
    runtime: str = ""
    """Value of ``PJRT_DEVICE`` for this kind."""
    hides_all: str = ""
    """Value of the mask that hides every device."""

    @property
    def torch_type(self) -> str:
        """Type of the devices in torch."""
        return self.torch or self.name


# None of the kinds from rocm to privateuse1 has been tested on its hardware. docs/reference/devices.md says what
# is unverified.
_TABLE = (
    KindFacts("cuda", ("CUDA_VISIBLE_DEVICES",), ("CUDA_",), torch_index="mask", vendor="cuda:Cuda"),
    # torch for ROCm keeps CUDA's name of the devices.
    KindFacts(
        "rocm",
        ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        build=("hip", "ROCm"),
        torch="cuda",
        torch_index="mask",
        vendor="rocm:Rocm",
    ),
    KindFacts(
        "xpu",
        ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
        ("ZE_", "SYCL_DEVICE_ALLOWLIST"),
        build=("xpu", "XPU"),
        vendor="xpu:Xpu",
    ),
    # Intel's (Habana's) Gaudi. A process opens the module that HLS_MODULE_ID names, else a free module of those in
    # HABANA_VISIBLE_MODULES. Whether Synapse's count follows the mask is unverified, so a larger count is no error.
    KindFacts(
        "hpu",
        ("HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"),
        backend="hccl",
        package="habana_frameworks",
        imports=("habana_frameworks.torch.core", "habana_frameworks.torch.distributed.hccl"),
        counter="habana_frameworks.torch.hpu:device_count",
        sees_all=True,
        torch_index="mask",
        title="Intel Gaudi",
        nodes=("accel/accel([0-9]+)",),
        maker=0x1DA3,
        number="device/module_id",
        model="device/device_type",
        single_process=True,
        single="HLS_MODULE_ID",
    ),
    # Huawei's Ascend. The CANN environment variable reference calls it a trial variable, supports only ascending
    # lists of digits and commas (older releases kept the order), forbids to combine it with the DCMI and HCCN tools,
    # and does not define an empty value. Unverified: that sysfs has a class with the nodes' names.
    KindFacts(
        "npu",
        ("ASCEND_RT_VISIBLE_DEVICES",),
        backend="hccl",
        package="torch_npu",
        title="Ascend NPU",
        nodes=("davinci([0-9]+)",),
        hides_all="-1",
    ),
    # No reference of MLU_VISIBLE_DEVICES was found. Public scripts, accelerate and DeepSpeed write it as a list of
    # numbers separated by commas. A port of Ray for MLUs reads the empty string as no device, and TensorFlow scripts
    # for MLUs use it to stay on the CPU.
    KindFacts(
        "mlu",
        ("MLU_VISIBLE_DEVICES",),
        backend="cncl",
        package="torch_mlu",
        title="Cambricon MLU",
        nodes=("cambricon_dev([0-9]+)",),
    ),
    # No reference of MUSA_VISIBLE_DEVICES was found. Public scripts write it as for MLUs, and Moore Threads' own
    # device plugin for Paddle reads the empty string as no device.
    KindFacts(
        "musa",
        ("MUSA_VISIBLE_DEVICES",),
        backend="mccl",
        package="torch_musa",
        title="Moore Threads GPU",
        nodes=(r"mtgpu\.?([0-9]+)",),
    ),
    # Google's own driver has nodes /dev/accelN, VFIO has a node for each IOMMU group. The ids of PCI devices are those
    # in JAX's hardware_utils.py and torch_xla's _internal/tpu.py. The second variable is the old name of the first.
    KindFacts(
        "tpu",
        ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", PJRT_DEVICE),
        ("TPU_",),
        backend="xla",
        package="torch_xla",
        imports=("torch_xla.distributed.xla_backend",),
        counter="torch_xla.runtime:addressable_device_count",
        torch="xla",
        vendor="numbered:Tpu",
        title="Google TPU",
        nodes=("accel([0-9]+)", "vfio/([0-9]+)"),
        maker=0x1AE0,
        models={0x56: "TPU v4 lite", 0x5E: "TPU v4", 0x62: "TPU v5p", 0x63: "TPU v5e", 0x6F: "TPU v6e", 0x76: "TPU 7x"},
        single_process=True,
        runtime="TPU",
    ),
    # AWS Trainium and Inferentia.
    KindFacts(
        "neuron",
        ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", PJRT_DEVICE),
        ("NEURON_",),
        backend="xla",
        package="torch_neuronx",
        imports=("torch_xla.distributed.xla_backend",),
        counter="torch_xla.runtime:addressable_device_count",
        torch="xla",
        vendor="numbered:Neuron",
        title="AWS NeuronCore",
        nodes=("neuron([0-9]+)",),
        model="info/architecture/device_name",
        single_process=True,
        runtime="NEURON",
    ),
    KindFacts("mps", ranks=False, backend="gloo", sees_all=True, torch_index=None, vendor="mps:Mps"),
    KindFacts("privateuse1", shown=("TORCH_DEVICE_BACKEND_AUTOLOAD",), sees_all=True, vendor="privateuse1:PrivateUse1"),
    KindFacts("cpu", hardware=False, backend="gloo", torch_index=None, vendor="cpu:Cpu"),
    KindFacts(
        "sim",
        ("SIM_VISIBLE_DEVICES",),
        hardware=False,
        backend="gloo",
        torch="cpu",
        torch_index=None,
        vendor="sim:Sim",
    ),
)
KINDS = {kind.name: kind for kind in _TABLE}
"""The kinds of this package by name, in the order in which ``auto`` tries them."""
KINDS_OF_BACKEND = {"nccl": ("cuda", "rocm"), "xccl": ("xpu",)}
"""The kinds that a backend serves, for backends that do not serve the CPU (``Backend.backend_capability``).

torch for ROCm has RCCL under the name of NCCL.
"""
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_NO_KINDS = ("auto", "none")


def kinds() -> tuple[str, ...]:
    """Return all kinds in the order in which ``auto`` tries them: this package's own first."""
    return (*KINDS, *sorted(published()))


@cache
def published() -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of other packages, by kind. This package's own kinds cannot be replaced.

    The first call reads the metadata of every installed package, which takes some milliseconds.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        if _NAME.fullmatch(point.name) and point.name not in (*KINDS, *_NO_KINDS):
            found[point.name] = (*found.get(point.name, ()), point)
    return found


def name_kinds(text: str) -> str:
    """Return `text` with the names of all kinds in place of ``{kinds}``. Entry points are read only then."""
    return text.replace("{kinds}", ", ".join(kinds()))


def check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` exists."""
    # Entry points are read only for a name that is not one of this package's own kinds.
    if kind not in KINDS and kind not in published():
        raise ValueError(f"kind {kind!r}: allowed are {', '.join(kinds())}")
