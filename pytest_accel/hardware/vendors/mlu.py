"""Cambricon's MLUs: a node ``/dev/cambricon_devN`` each, used through ``torch_mlu``. Not tested on an MLU.

No reference of ``MLU_VISIBLE_DEVICES`` was found. Public scripts, accelerate and DeepSpeed write it as a list of
numbers separated by commas. A port of Ray for MLUs reads the empty string as no device, and TensorFlow scripts for MLUs
use it to stay on the CPU. Unverified: the effect of an invalid entry, whether the order is kept, and that the numbers
are the positions of the nodes.
"""

from pytest_accel.hardware.vendors.device_nodes import NumberedVendor


class Mlu(NumberedVendor):
    """The vendor of kind ``mlu``."""

    kind = "mlu"
    mask_variables: tuple[str, ...] = ("MLU_VISIBLE_DEVICES",)
    backend: str | None = "cncl"
    package = "torch_mlu"
    name = "Cambricon MLU"
    node = r"cambricon_dev([0-9]+)"


make = Mlu.make
