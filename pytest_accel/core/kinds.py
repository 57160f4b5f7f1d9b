"""The kinds of accelerator: this package's own, and those that other packages publish.

A package publishes a kind as an entry point of the group ``pytest_accel.vendors``. Its name is the kind. Its value is a
callable that takes the text after the colon of ``--accel`` (None if there is none) and returns the
:class:`~pytest_accel.core.device.Vendor`, or raises ValueError if the text is not allowed.
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
"""Placeholder for the names of all kinds, which `name_kinds` replaces, so that entry points are read only then."""


def kinds() -> tuple[str, ...]:
    """Return all kinds in the order in which ``auto`` tries them: this package's own first."""
    return (*OWN_KINDS, *sorted(published()))


@cache
def published() -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of other packages, by kind. This package's own kinds cannot be replaced.

    The first call reads the metadata of every installed package, which takes some milliseconds.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        if _NAME.fullmatch(point.name) and point.name not in (*OWN_KINDS, *_NO_KINDS):
            found[point.name] = (*found.get(point.name, ()), point)
    return found


def name_kinds(text: str) -> str:
    """Return `text` with the names of all kinds in place of `ALL_KINDS`."""
    return text.replace(ALL_KINDS, ", ".join(kinds()))


def check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` exists."""
    # Entry points are read only for a name that is not one of this package's own kinds.
    if kind not in OWN_KINDS and kind not in published():
        raise ValueError(f"kind {kind!r}: allowed are {', '.join(kinds())}")
