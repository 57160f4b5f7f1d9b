"""Cambricon's MLUs: a node ``/dev/cambricon_devN`` each, used through ``torch_mlu``. Not confirmed on an MLU.

No reference of ``MLU_VISIBLE_DEVICES`` could be found. That it is a list of numbers with commas between them is what
public scripts, accelerate and DeepSpeed write; that the empty string is none is how a port of Ray for MLUs reads it,
and how TensorFlow scripts for MLUs keep to the CPU. What a wrong entry does, whether the order is kept, and that the
numbers are the nodes' places, is unverified.
"""

from __future__ import annotations

import re

from pytest_accel.hardware.registry import takes_none
from pytest_accel.hardware.vendors.device_nodes import Numbered


class Mlu(Numbered):
    """The vendor of kind ``mlu``."""

    kind = "mlu"
    mask_variables: tuple[str, ...] = ("MLU_VISIBLE_DEVICES",)
    backend: str | None = "cncl"
    _package = "torch_mlu"
    _name = "Cambricon MLU"
    _nodes = re.compile(r"cambricon_dev([0-9]+)", re.ASCII)
    _hidden = ""


def make(argument: str | None) -> Mlu:
    """For ``--accel mlu``."""
    takes_none("mlu", argument)
    return Mlu()
