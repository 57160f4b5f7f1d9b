"""The kinds of accelerator: this package's own, and those that other packages publish.

A package publishes a kind as an entry point of the group ``pytest_accel.vendors``: its name is the kind, its value a
callable that makes the :class:`~pytest_accel.core.device.Vendor` from the text after the colon of ``--accel``
(None: there is none), and raises ValueError for a text that it does not take.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "pytest_accel.vendors"
OWN_KINDS = ("cuda", "rocm", "xpu", "hpu", "npu", "mlu", "musa", "tpu", "neuron", "mps", "privateuse1", "cpu", "sim")
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_NO_KINDS = ("auto", "none")


ALL_KINDS = "{kinds}"
"""Stands in a text for every kind, until `name_kinds` puts them there: packages are not asked for theirs before."""


def kinds() -> tuple[str, ...]:
    """Every kind that a test can name, in the order in which ``auto`` looks for them: this package's own first."""
    return (*OWN_KINDS, *sorted(published()))


@cache
def published() -> dict[str, tuple[EntryPoint, ...]]:
    """The entry points of other packages, by kind. This package's own kinds cannot be replaced.

    Looking them up reads the metadata of every installed package, some milliseconds in all.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        if _NAME.fullmatch(point.name) and point.name not in (*OWN_KINDS, *_NO_KINDS):
            found[point.name] = (*found.get(point.name, ()), point)
    return found


def name_kinds(text: str) -> str:
    """`text` with every kind in the place of `ALL_KINDS`."""
    return text.replace(ALL_KINDS, ", ".join(kinds()))


def check_kind(kind: str) -> None:
    """ValueError unless `kind` is one that a test can ask for."""
    # Whether others publish kinds is looked up only for a name that is none of ours.
    if kind not in OWN_KINDS and kind not in published():
        raise ValueError(f"kind {kind!r}: allowed are {', '.join(kinds())}")
