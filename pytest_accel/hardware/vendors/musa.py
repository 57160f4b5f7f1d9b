"""Moore Threads' GPUs: a node ``/dev/mtgpu.N`` or ``/dev/mtgpuN`` each, used through ``torch_musa``.

No reference of ``MUSA_VISIBLE_DEVICES`` was found. Public scripts write it as a list of numbers separated by commas.
Moore Threads' own device plugin for Paddle reads the empty string as no device. Unverified: the effect of an invalid
entry, whether the order is kept, and that the numbers are the positions of the nodes. ``MTHREADS_VISIBLE_DEVICES`` is a
variable of the container runtime. This module has not been tested on such a GPU.
"""

from __future__ import annotations

import re

from pytest_accel.hardware.registry import takes_none
from pytest_accel.hardware.vendors.device_nodes import NumberedVendor


class Musa(NumberedVendor):
    """The vendor of kind ``musa``."""

    kind = "musa"
    mask_variables: tuple[str, ...] = ("MUSA_VISIBLE_DEVICES",)
    backend: str | None = "mccl"
    _package = "torch_musa"
    _name = "Moore Threads GPU"
    _nodes = re.compile(r"mtgpu\.?([0-9]+)", re.ASCII)
    _hidden = ""


def make(argument: str | None) -> Musa:
    """Return the vendor for ``--accel musa``."""
    takes_none("musa", argument)
    return Musa()
