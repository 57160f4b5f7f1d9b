"""Parsing and formatting of counts, times, amounts of memory and compute capabilities."""

from __future__ import annotations

import math
import re
import sys

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
_TIME = re.compile(r"([0-9]{0,9}(?:\.[0-9]{1,9})?)\s*(s|min|h|)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600}
_COUNT = re.compile(r"[0-9]{1,6}", re.ASCII)
_CAPABILITY = re.compile(r"[0-9]+(?:\.[0-9]+)*", re.ASCII)


def parse_memory(value: object) -> int:
    """Return bytes from ``"40GiB"`` (1024-based), ``"512MB"`` (1000-based) or a number of bytes; else ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and (match := _MEMORY.fullmatch(value.strip())):
        number, unit = match.groups()
        size = float(number) * _UNITS.get(unit.lower(), 0)
        if 1 <= size < math.inf:
            return int(size)
    raise ValueError(
        f"memory {value!r}: allowed are a positive number with KiB, MiB, GiB or TiB (1024-based), "
        "KB, MB, GB or TB (1000-based) or B, as in '40GiB', and a positive int for bytes"
    )


def format_memory(size: int) -> str:
    """Return ``80 GiB`` or ``79.2 GiB``, for example: 1024-based, with one decimal unless it is 0."""
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1023.95 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.1f}".removesuffix(".0") + f" {unit}"


def parse_time(value: object) -> float:
    """Return seconds >= 0 from ``"90s"``, ``"5min"``, ``"1.5h"``, or a number of seconds; else raise ValueError."""
    # Comparisons with nan are false, so nan is rejected too. float() raises OverflowError for a larger int.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value)
    if isinstance(value, str) and (match := _TIME.fullmatch(value.strip())) and match[1]:
        return float(match[1]) * _SECONDS[match[2]]
    raise ValueError(f"time {value!r}: allowed are seconds >= 0, and texts such as '90s', '5min' or '1.5h'")


def is_count(text: str) -> bool:
    """Return whether `text` is a positive integer below a million, in ASCII digits only."""
    return _COUNT.fullmatch(text) is not None and int(text) > 0


def parse_capability(value: object) -> tuple[int, ...]:
    """Return ``(9, 0)`` for ``"9.0"`` or ``"9"``; raise ValueError unless `value` has numbers separated by dots."""
    if isinstance(value, str) and _CAPABILITY.fullmatch(value.strip()):
        parts = tuple(int(part) for part in value.strip().split("."))
        return parts if len(parts) > 1 else (*parts, 0)
    raise ValueError(f"capability {value!r}: allowed is a string of numbers with dots between them, as in '9.0'")


def format_capability(capability: tuple[int, ...]) -> str:
    """Return ``9.0`` for ``(9, 0)``."""
    return ".".join(str(part) for part in capability)


def count_text(count: int, word: str) -> str:
    """Return ``1 test`` or ``2 tests``, for example; `word` is the singular."""
    return f"{count} {word}{'' if count == 1 else 's'}"
