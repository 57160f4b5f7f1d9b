"""Huawei's Ascend NPUs: a node ``/dev/davinciN`` each, used through ``torch_npu``. Not confirmed on an NPU.

``ASCEND_RT_VISIBLE_DEVICES`` (CANN environment variable reference) holds the runtime's own numbers, from 0. It is
called a trial variable there, that only an ascending list is supported, and that it is not to be combined with the DCMI
and HCCN tools. That the numbers are the nodes' places, and that sysfs has a class with the nodes' names, is unverified.
``ASCEND_VISIBLE_DEVICES`` is the container runtime's: what it hides has no node.
"""

from __future__ import annotations

import re

from pytest_accel.hardware.registry import takes_none
from pytest_accel.hardware.vendors.device_nodes import Numbered, read_numbers


class Npu(Numbered):
    """The vendor of kind ``npu``."""

    kind = "npu"
    mask_variables: tuple[str, ...] = ("ASCEND_RT_VISIBLE_DEVICES",)
    backend: str | None = "hccl"
    _package = "torch_npu"
    _name = "Ascend NPU"
    _nodes = re.compile(r"davinci([0-9]+)", re.ASCII)
    # What follows an invalid number is not read, says the reference; of an empty value it says nothing.
    _hidden = "-1"

    def _read(self, text: str) -> list[int]:
        return read_ascend(text)


def make(argument: str | None) -> Npu:
    """For ``--accel npu``."""
    takes_none("npu", argument)
    return Npu()


def read_ascend(text: str) -> list[int]:
    """The numbers of ``ASCEND_RT_VISIBLE_DEVICES=text``.

    Only what stands before the first character that is neither digit nor comma is read: ``1, 2`` is 1. A list that does
    not ascend is not supported (older releases kept its order); it is taken to name the same devices in ascending
    order, a repetition once.
    """
    readable = re.match(r"[0-9,]*", text, re.ASCII)
    assert readable is not None
    return sorted(read_numbers(readable.group()))
