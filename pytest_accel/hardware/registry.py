"""The vendors of all kinds of accelerator: this package's own, and vendors that other packages publish."""

from __future__ import annotations

import pkgutil
from importlib.metadata import EntryPoint

from pytest_accel.core.device import Vendor
from pytest_accel.core.kinds import KINDS, published


class VendorError(ValueError):
    """The vendor of a kind is broken or needs an argument; the message names the distribution that published it."""


def make_vendor(kind: str, argument: str | None = None) -> Vendor:
    """Return a new vendor of `kind`, which `check_kind` must accept, or of a named resource with `argument` devices.

    Raise ValueError if the vendor does not allow `argument`, and :class:`VendorError` if a published kind needs an
    argument, cannot be loaded, is not a vendor, or is published twice.
    """
    if facts := KINDS.get(kind):
        if argument is not None and facts.hardware:
            raise ValueError(f"--accel {kind}:{argument}: {kind} takes nothing after a colon")
        own: Vendor = pkgutil.resolve_name(f"pytest_accel.hardware.vendors.{facts.vendor}")(facts, argument)
        return own
    points = published().get(kind, ())
    if not points:
        assert argument is not None  # A named resource always has a number.
        from pytest_accel.hardware.vendors.named import Named

        return Named(kind, int(argument))
    source = describe_kind(kind)
    if len(points) > 1:
        raise VendorError(f"{source}: it can be published once; uninstall the others")
    try:
        made = points[0].load()(argument)
    except ValueError as error:
        raise (VendorError if argument is None else ValueError)(f"{source}: {error}") from error
    except Exception as error:
        raise VendorError(f"{source} cannot be loaded: {type(error).__name__}: {error}") from error
    names = sorted(name for name in {**Vendor.__annotations__, **vars(Vendor)} if not name.startswith("_"))
    lacking = [name for name in names if not hasattr(made, name)]
    if lacking:
        raise VendorError(f"{source} is no vendor: {type(made).__name__} has no {', '.join(lacking)}")
    if made.kind != kind:
        raise VendorError(f"{source}: the vendor calls itself {made.kind!r}, its entry point {kind!r}")
    vendor: Vendor = made
    return vendor


def describe_kind(kind: str) -> str:
    """Return ``kind 'cuda'``; for a published kind, with the distributions that publish it."""
    points = () if kind in KINDS else published().get(kind, ())
    return f"kind {kind!r}" + (f" of {' and of '.join(map(_distribution, points))}" if points else "")


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
