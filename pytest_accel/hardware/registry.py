"""The kinds of accelerator: this package's own, and those that other packages publish.

A package publishes a kind as an entry point of the group ``pytest_accel.vendors``: its name is the kind, its value a
callable that makes the :class:`~pytest_accel.core.device.Vendor` from the text after the colon of ``--accel``
(None: there is none), and raises ValueError for a text that it does not take.
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
"""Stands in a text for every kind, until `name_kinds` puts them there: packages are not asked for theirs before."""


class VendorError(ValueError):
    """The vendor of a kind does not do what a vendor does; the message names the distribution that published it."""


def kinds() -> tuple[str, ...]:
    """Every kind that a test can name, in the order in which ``auto`` looks for them: this package's own first."""
    return (*_OWN, *sorted(published()))


@cache
def published() -> dict[str, tuple[EntryPoint, ...]]:
    """The entry points of other packages, by kind. This package's own kinds cannot be replaced.

    Looking them up reads the metadata of every installed package, some milliseconds in all.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        if _NAME.fullmatch(point.name) and point.name not in (*_OWN, *_NO_KINDS):
            found[point.name] = (*found.get(point.name, ()), point)
    return found


def name_kinds(text: str) -> str:
    """`text` with every kind in the place of `ALL_KINDS`."""
    return text.replace(ALL_KINDS, ", ".join(kinds()))


def check_kind(kind: str) -> None:
    """ValueError unless `kind` is one that a test can ask for."""
    # Whether others publish kinds is looked up only for a name that is none of ours.
    if kind not in _OWN and kind not in published():
        raise ValueError(f"kind {kind!r}: allowed are {', '.join(kinds())}")


def make_vendor(kind: str, argument: str | None = None) -> Vendor:
    """The vendor of `kind` (one that `check_kind` lets pass).

    ValueError for an `argument` that it does not take; :class:`VendorError` for a published kind that cannot be loaded,
    is no vendor, or is published twice.
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
    """``kind 'cuda'``; for a published one with the distributions that it comes from."""
    points = () if kind in _OWN else published().get(kind, ())
    return f"kind {kind!r}" + (f" of {' and of '.join(map(_distribution, points))}" if points else "")


def takes_none(kind: str, argument: str | None) -> None:
    """ValueError for an `argument` to a kind that has none to take."""
    if argument is not None:
        raise ValueError(f"--accel {kind}:{argument}: {kind} takes nothing after a colon")


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _vendor_names() -> list[str]:
    return sorted({*Vendor.__annotations__, *(name for name in vars(Vendor) if not name.startswith("_"))})


def _has(made: Any, name: str) -> bool:
    missing = object()
    return getattr_static(made, name, missing) is not missing
