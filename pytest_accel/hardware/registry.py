"""Registry of the kinds of accelerator: this package's own, and those that other packages publish.

A package publishes a kind as an entry point of the group ``pytest_accel.vendors``. Its name is the kind. Its value is a
callable that takes the text after the colon of ``--accel`` (None if there is none) and returns the
:class:`~pytest_accel.core.device.Vendor`, or raises ValueError if the text is not allowed.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import getattr_static
from typing import Any

from pytest_accel.core.device import Vendor

GROUP = "pytest_accel.vendors"
_OWN = ("cuda", "rocm", "xpu", "hpu", "npu", "mlu", "musa", "tpu", "neuron", "mps", "privateuse1", "cpu", "sim")
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_NO_KINDS = ("auto", "none")


ALL_KINDS = "{kinds}"
"""Placeholder for the names of all kinds, which `name_kinds` replaces, so that entry points are read only then."""


class VendorError(ValueError):
    """The vendor of a kind is broken; the message names the distribution that published it."""


def kinds() -> tuple[str, ...]:
    """Return all kinds in the order in which ``auto`` tries them: this package's own first."""
    return (*_OWN, *sorted(published()))


@cache
def published() -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of other packages, by kind. This package's own kinds cannot be replaced.

    The first call reads the metadata of every installed package, which takes some milliseconds.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        if _NAME.fullmatch(point.name) and point.name not in (*_OWN, *_NO_KINDS):
            found[point.name] = (*found.get(point.name, ()), point)
    return found


def name_kinds(text: str) -> str:
    """Return `text` with the names of all kinds in place of `ALL_KINDS`."""
    return text.replace(ALL_KINDS, ", ".join(kinds()))


def check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` exists."""
    # Entry points are read only for a name that is not one of this package's own kinds.
    if kind not in _OWN and kind not in published():
        raise ValueError(f"kind {kind!r}: allowed are {', '.join(kinds())}")


def make_vendor(kind: str, argument: str | None = None) -> Vendor:
    """Return a new vendor of `kind`, which `check_kind` must accept.

    Raise ValueError if it does not allow `argument`, and :class:`VendorError` if a published kind cannot be loaded, is
    not a vendor, or is published twice.
    """
    if kind in _OWN:
        own: Vendor = importlib.import_module(f"pytest_accel.hardware.vendors.{kind}").make(argument)
        return own
    points = published()[kind]
    source = describe_kind(kind)
    if len(points) > 1:
        raise VendorError(f"{source}: it can be published once; uninstall the others")
    try:
        made = points[0].load()(argument)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    except Exception as error:
        raise VendorError(f"{source} cannot be loaded: {type(error).__name__}: {error}") from error
    lacking = [name for name in _vendor_names() if not _has(made, name)]
    if lacking:
        raise VendorError(f"{source} is no vendor: {type(made).__name__} has no {', '.join(lacking)}")
    if made.kind != kind:
        raise VendorError(f"{source}: the vendor calls itself {made.kind!r}, its entry point {kind!r}")
    vendor: Vendor = made
    return vendor


def describe_kind(kind: str) -> str:
    """Return ``kind 'cuda'``; for a published kind, with the distributions that publish it."""
    points = () if kind in _OWN else published().get(kind, ())
    return f"kind {kind!r}" + (f" of {' and of '.join(map(_distribution, points))}" if points else "")


def takes_none(kind: str, argument: str | None) -> None:
    """Raise ValueError if `argument` is not None, for a kind that takes no argument."""
    if argument is not None:
        raise ValueError(f"--accel {kind}:{argument}: {kind} takes nothing after a colon")


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _vendor_names() -> list[str]:
    return sorted({*Vendor.__annotations__, *(name for name in vars(Vendor) if not name.startswith("_"))})


def _has(made: Any, name: str) -> bool:
    missing = object()
    return getattr_static(made, name, missing) is not missing
