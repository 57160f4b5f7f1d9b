"""Huawei's Ascend NPUs: a node ``/dev/davinciN`` each, used through ``torch_npu``. Not tested on an NPU.

``ASCEND_RT_VISIBLE_DEVICES`` holds the runtime's own numbers, from 0. The CANN environment variable reference calls it
a trial variable, supports only ascending lists, and forbids to combine it with the DCMI and HCCN tools. Unverified:
that the numbers are the positions of the nodes, and that sysfs has a class with the nodes' names.
``ASCEND_VISIBLE_DEVICES`` is a variable of the container runtime: devices that it hides have no node.
"""

from itertools import takewhile

from pytest_accel.hardware.masks import read_numbers
from pytest_accel.hardware.vendors.device_nodes import NumberedVendor


class Npu(NumberedVendor):
    """The vendor of kind ``npu``."""

    kind = "npu"
    mask_variables: tuple[str, ...] = ("ASCEND_RT_VISIBLE_DEVICES",)
    backend: str | None = "hccl"
    package = "torch_npu"
    name = "Ascend NPU"
    node = r"davinci([0-9]+)"
    # According to the reference, entries after an invalid number are ignored. It does not define an empty value.
    hides_all = "-1"

    def read(self, text: str) -> list[int]:
        """Return the numbers, ascending.

        The text is read up to the first character that is neither digit nor comma: ``1, 2`` is 1. A list that does not
        ascend is not supported (older releases kept its order); it is assumed to mean the same devices in ascending
        order, without repetitions.
        """
        return sorted(read_numbers("".join(takewhile("0123456789,".__contains__, text))))


make = Npu.make
