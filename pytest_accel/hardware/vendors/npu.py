"""Huawei's Ascend NPUs: a node ``/dev/davinciN`` each, used through ``torch_npu``. Not tested on an NPU.

``ASCEND_RT_VISIBLE_DEVICES`` holds the runtime's own numbers, from 0. The CANN environment variable reference calls it
a trial variable, supports only ascending lists, and forbids to combine it with the DCMI and HCCN tools. Unverified:
that the numbers are the positions of the nodes, and that sysfs has a class with the nodes' names.
``ASCEND_VISIBLE_DEVICES`` is a variable of the container runtime: devices that it hides have no node.
"""

from __future__ import annotations

import re

from pytest_accel.hardware.registry import takes_none
from pytest_accel.hardware.vendors.device_nodes import NumberedVendor, read_numbers


class Npu(NumberedVendor):
    """The vendor of kind ``npu``."""

    kind = "npu"
    mask_variables: tuple[str, ...] = ("ASCEND_RT_VISIBLE_DEVICES",)
    backend: str | None = "hccl"
    _package = "torch_npu"
    _name = "Ascend NPU"
    _nodes = re.compile(r"davinci([0-9]+)", re.ASCII)
    # According to the reference, entries after an invalid number are ignored. It does not define an empty value.
    _hidden = "-1"

    def _read(self, text: str) -> list[int]:
        return read_ascend(text)


def make(argument: str | None) -> Npu:
    """Return the vendor for ``--accel npu``."""
    takes_none("npu", argument)
    return Npu()


def read_ascend(text: str) -> list[int]:
    """Return the numbers of ``ASCEND_RT_VISIBLE_DEVICES=text``, ascending.

    The text is read up to the first character that is neither digit nor comma: ``1, 2`` is 1. A list that does not
    ascend is not supported (older releases kept its order); it is assumed to mean the same devices in ascending order,
    without repetitions.
    """
    readable = re.match(r"[0-9,]*", text, re.ASCII)
    assert readable is not None
    return sorted(read_numbers(readable.group()))
