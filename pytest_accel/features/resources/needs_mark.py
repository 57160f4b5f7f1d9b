"""The mark `needs`: its arguments, and the leases that a test with such marks takes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.marks import MarkError, mark_text
from pytest_accel.core.needs import DriverLeases
from pytest_accel.core.units import count_text, format_memory, parse_memory
from pytest_accel.core.world_key import WorldKey

MARKER_LINE = (
    'needs(*names, **counts): lease these resources of accel_resources while the test runs, as in needs("license") or '
    'needs(license=2, cores=4, memory="8GiB"); needs({"port-9000": 1}) for names that are no identifiers.'
)


class Supply(NamedTuple):
    """The resources that a session has."""

    counts: Mapping[str, int]
    """The number of each named resource, of ``memory`` that of its parts, of ``cores`` that of the CPU slots."""
    memory_part: int
    """Bytes of a part of ``memory``."""


def read(marks: Iterable[pytest.Mark], names: Collection[str]) -> dict[str, int]:
    """Return what a test with these `marks` needs, by name: the most that any of them gives.

    The need for ``memory`` is in bytes. Raise :class:`MarkError` for an argument that is not allowed.
    """
    needs: dict[str, int] = {}
    for mark in marks:
        given = [*chain(*map(_pairs, mark.args)), *mark.kwargs.items()]
        if not given:
            raise MarkError(f"@pytest.mark.{mark_text(mark)}: needs at least one of {', '.join(names)}")
        for name, value in given:
            if name not in names:
                raise MarkError(
                    f"@pytest.mark.{mark_text(mark)}: there is no resource {name!r} in accel_resources, "
                    f"allowed are {', '.join(names)}"
                )
            needs[name] = max(_amount(mark, name, value), needs.get(name, 0))
    return needs


def _pairs(argument: Any) -> list[tuple[Any, object]]:
    """Return the names in a positional argument, each with its number; None, which means one, for a single name."""
    return list(argument.items()) if isinstance(argument, Mapping) else [(argument, None)]


def _amount(mark: pytest.Mark, name: str, value: object) -> int:
    if name == "memory":
        allowed = 'a positive size such as "8GiB", a positive int of bytes'
        try:
            return parse_memory(value)
        except ValueError:
            pass
    elif value is None:
        return 1
    else:
        allowed = "an int >= 1"
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
    raise MarkError(f"@pytest.mark.{mark_text(mark)}: {name} must be {allowed}, got {value!r}")


def leases(marks: Iterable[pytest.Mark], supply: Supply) -> DriverLeases:
    """Return the leases of a test with these `marks`, or why it can have none. Raise :class:`MarkError` like `read`.

    They are sorted by name, with the CPU cores last: all tests request them in one order.
    """
    marks = tuple(marks)
    needs = read(marks, supply.counts)
    found: list[tuple[WorldKey, str]] = []
    missing: list[str] = []
    for name in sorted(needs, key=lambda name: (name == "cores", name)):
        amount, available = needs[name], supply.counts[name]
        text, there = f"{amount} {name}", f"there {'is' if available == 1 else 'are'} {available}"
        if name == "memory":
            there = f"there is {format_memory(available * supply.memory_part)}"
            text = f"{format_memory(amount)} of memory"
            amount = -(-amount // supply.memory_part)
        elif name == "cores":
            text = count_text(amount, "core")
        found.append((_key(name, amount), text))
        if amount > available:
            missing.append(f"needs {text}; {there}")
    return DriverLeases(tuple(found), "; ".join(missing) or None, marks)


def _key(name: str, count: int) -> WorldKey:
    if name == "cores":
        return WorldKey("cpu", None, count, grouped=False)
    return WorldKey(name, DeviceNeed(count, kind=name), 1, grouped=False, devices_per_rank=count)
