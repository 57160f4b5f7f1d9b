"""Counts, amounts of memory and compute capabilities: the forms in which people write them."""

from __future__ import annotations

import re

_UNITS = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", re.IGNORECASE | re.ASCII)
_CAPABILITY = re.compile(r"[0-9]+(?:\.[0-9]+)*", re.ASCII)


def parse_memory(value: object) -> int:
    """Bytes from ``"40GiB"`` (1024-based), ``"512MB"`` (1000-based) or a number of bytes; ValueError for all else."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and (match := _MEMORY.fullmatch(value.strip())):
        number, unit = match.groups()
        size = int(float(number) * _UNITS.get(unit.lower(), 0))
        if size > 0:
            return size
    raise ValueError(
        f"memory {value!r}: allowed are a positive number with KiB, MiB, GiB or TiB (1024-based), "
        "KB, MB, GB or TB (1000-based) or B, as in '40GiB', and a positive int for bytes"
    )


def format_memory(size: int) -> str:
    """For example ``80 GiB`` or ``79.2 GiB``: 1024-based, one decimal where it says something."""
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1023.95 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.1f}".removesuffix(".0") + f" {unit}"


def is_count(text: str) -> bool:
    """Whether `text` is a whole number from 1, in digits alone."""
    return text.isdecimal() and text.isascii() and int(text) > 0


def parse_capability(value: object) -> tuple[int, ...]:
    """``"9.0"`` or ``"9"`` as ``(9, 0)``; ValueError for anything but numbers with dots between them."""
    if isinstance(value, str) and _CAPABILITY.fullmatch(value.strip()):
        parts = tuple(int(part) for part in value.strip().split("."))
        return parts if len(parts) > 1 else (*parts, 0)
    raise ValueError(f"capability {value!r}: allowed is a string of numbers with dots between them, as in '9.0'")


def format_capability(capability: tuple[int, ...]) -> str:
    """``(9, 0)`` as ``9.0``."""
    return ".".join(str(part) for part in capability)
