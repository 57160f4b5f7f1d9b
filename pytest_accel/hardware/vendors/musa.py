"""Moore Threads' GPUs: a node ``/dev/mtgpu.N`` or ``/dev/mtgpuN`` each, used through ``torch_musa``.

No reference of ``MUSA_VISIBLE_DEVICES`` could be found. That it is a list of numbers with commas between them is what
public scripts write; that the empty string is none is how Moore Threads' own device plugin for Paddle reads it. What a
wrong entry does, whether the order is kept, and that the numbers are the nodes' places, is unverified.
``MTHREADS_VISIBLE_DEVICES`` is the container runtime's. Not confirmed on such a GPU.
"""

from __future__ import annotations

import re

from pytest_accel.hardware.registry import takes_none
from pytest_accel.hardware.vendors.device_nodes import Numbered


class Musa(Numbered):
    """The vendor of kind ``musa``."""

    kind = "musa"
    mask_variables: tuple[str, ...] = ("MUSA_VISIBLE_DEVICES",)
    backend: str | None = "mccl"
    _package = "torch_musa"
    _name = "Moore Threads GPU"
    _nodes = re.compile(r"mtgpu\.?([0-9]+)", re.ASCII)
    _hidden = ""


def make(argument: str | None) -> Musa:
    """For ``--accel musa``."""
    takes_none("musa", argument)
    return Musa()
