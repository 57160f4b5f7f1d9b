"""Moore Threads' GPUs: a node ``/dev/mtgpu.N`` or ``/dev/mtgpuN`` each, used through ``torch_musa``.

No reference of ``MUSA_VISIBLE_DEVICES`` was found. Public scripts write it as a list of numbers separated by commas.
Moore Threads' own device plugin for Paddle reads the empty string as no device. Unverified: the effect of an invalid
entry, whether the order is kept, and that the numbers are the positions of the nodes. ``MTHREADS_VISIBLE_DEVICES`` is a
variable of the container runtime. This module has not been tested on such a GPU.
"""

from pytest_accel.hardware.vendors.device_nodes import NumberedVendor


class Musa(NumberedVendor):
    """The vendor of kind ``musa``."""

    kind = "musa"
    mask_variables: tuple[str, ...] = ("MUSA_VISIBLE_DEVICES",)
    backend: str | None = "mccl"
    package = "torch_musa"
    name = "Moore Threads GPU"
    node = r"mtgpu\.?([0-9]+)"


make = Musa.make
