"""Values that all ranks of a test must have in common, and the text that shows where they differ."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pytest_accel.accounts import ranks_text

_MOST_LINES = 200
"""The lines that are shown of one difference: the rest of a large snapshot tells nothing new."""


def _equal(left: object, right: object) -> bool:
    return type(left) is type(right) and left == right


def difference(values: Mapping[int, Any], same: Callable[[Any, Any], bool] = _equal) -> str | None:
    """Return a text that shows how the `values`, by rank, differ; None: they are the `same`.

    A value is str, bytes or None, which stands for no value (no file).
    """
    groups: list[list[int]] = []
    for rank in sorted(values):
        group = next((group for group in groups if same(values[group[0]], values[rank])), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    if len(groups) < 2:
        return None
    first, *others = groups
    return "\n".join(_shown(first, values[first[0]], other, values[other[0]]) for other in others)


def fail(report: pytest.TestReport, title: str, text: str) -> None:
    """Fail `report` with `text`; one that has failed already gets a section with this `title`."""
    if report.failed:
        report.sections.append((title, text))
    else:
        report.outcome, report.longrepr = "failed", text


def _shown(ranks: list[int], value: str | bytes | None, others: list[int], other: str | bytes | None) -> str:
    if isinstance(value, bytes) and isinstance(other, bytes):
        try:
            return _shown(ranks, value.decode(), others, other.decode())
        except UnicodeDecodeError:
            length = min(len(value), len(other))
            first = next((at for at in range(length) if value[at] != other[at]), length)
            difference = f"{ranks_text(others)}: {len(other)} bytes, other from byte {first} on"
            return f"{ranks_text(ranks)}: {len(value)} bytes\n{difference}"
    if not (isinstance(value, str) and isinstance(other, str)):
        return f"{ranks_text(ranks)}: {_about(value)}\n{ranks_text(others)}: {_about(other)}"
    old, new = value.splitlines(), other.splitlines()
    lines = list(difflib.unified_diff(old, new, ranks_text(ranks), ranks_text(others), lineterm="", n=2))
    if not lines:
        return f"{ranks_text(ranks)} and {ranks_text(others)} differ in how lines end"
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... {len(lines) - _MOST_LINES} more lines"]
    return "\n".join(lines)


def _about(value: str | bytes | None) -> str:
    return "no value" if value is None else f"{len(value)} {'characters' if isinstance(value, str) else 'bytes'}"
