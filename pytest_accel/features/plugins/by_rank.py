"""Merges or compares the data of several ranks. Equal data appears once; other data is labelled by rank or refused."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pytest_accel.core.rank_data import PLAIN_TYPES
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.stash_keys import MARKED

Entry = TypeVar("Entry")
_MOST_LINES = 200
"""Lines of one difference in a report. More would hide the other failures."""


def to_plain(value: object) -> object:
    """Return `value` as data that a rank can send. Numbers and containers are kept; other objects become text."""
    if isinstance(value, (list, tuple)):
        return [to_plain(part) for part in value]
    if isinstance(value, dict):
        return {_scalar(key): to_plain(part) for key, part in value.items()}
    return _scalar(value)


def _scalar(value: object) -> object:
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()  # type: ignore[attr-defined]
    return value if type(value) in PLAIN_TYPES else str(value)


def number_of_ranks(item: pytest.Item) -> int:
    """Return how many ranks run the marked `item`."""
    ranks: int = item.stash[MARKED].key.ranks
    return ranks


def group_equal(received: Mapping[int, Sequence[Entry]], key: Callable[[Entry], str] = repr) -> list[dict[int, Entry]]:
    """Return groups of equal entries; each group has the entry of each rank that sent it.

    Entries are equal if `key` returns the same text. An entry that a rank has sent twice is in two groups. The groups
    keep the order in which ranks have sent their entries, as far as ranks agree on it.
    """
    found: dict[tuple[str, int], dict[int, Entry]] = {}
    places: dict[tuple[str, int], int] = {}
    for rank, entries in sorted(received.items()):
        times: Counter[str] = Counter()
        for place, entry in enumerate(entries):
            text = key(entry)
            times[text] += 1
            same = text, times[text]
            found.setdefault(same, {})[rank] = entry
            places[same] = max(places.get(same, 0), place)
    return [found[same] for same in sorted(found, key=lambda same: places[same])]


def rank_label(group: Mapping[int, object], ranks: int) -> str:
    """Return the text to append to a name for the ranks in `group`: empty for all `ranks`, else `` [rank 0]``."""
    if len(group) == ranks:
        return ""
    return f" [{ranks_text(list(group))}]"


def merge_equal(
    received: Mapping[int, Sequence[Entry]], ranks: int, key: Callable[[Entry], str] = repr
) -> list[tuple[str, Entry]]:
    """Return each distinct entry that ranks have sent, with the label of its ranks before it."""
    return [(rank_label(group, ranks), next(iter(group.values()))) for group in group_equal(received, key)]


def by_name(received: Mapping[int, Mapping[str, Entry]], label: str = " [rank {}]") -> dict[str, Entry]:
    """Return the named values of all ranks: one if the ranks that sent it agree, else one for each rank.

    `label` is appended to the name of a value of a single rank.
    """
    values: dict[str, list[tuple[int, Entry]]] = {}
    for rank, named in sorted(received.items()):
        for name, value in named.items():
            values.setdefault(name, []).append((rank, value))
    merged: dict[str, Entry] = {}
    for name, sent in values.items():
        if all(value == sent[0][1] for _, value in sent):
            merged[name] = sent[0][1]
        else:
            merged |= {f"{name}{label.format(rank)}": value for rank, value in sent}
    return merged


def _equal(left: object, right: object) -> bool:
    return type(left) is type(right) and left == right


def difference(values: Mapping[int, Any], same: Callable[[Any, Any], bool] = _equal) -> str | None:
    """Return a text that shows how the `values`, by rank, differ, or None if `same` holds for all of them.

    A value is str, bytes, or None if the rank has no value (no file).
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
    return "\n".join(_difference_of_two(first, values[first[0]], other, values[other[0]]) for other in others)


def fail(report: pytest.TestReport, title: str, text: str) -> None:
    """Fail `report` with `text`. If it has failed already, add a section called `title` instead."""
    if report.failed:
        report.sections.append((title, text))
    else:
        report.outcome, report.longrepr = "failed", text


def shown_path(config: pytest.Config, name: str) -> str:
    """Return the path `name` as reports show it: relative to the invocation folder, if it is below it."""
    here = config.invocation_params.dir
    return os.path.relpath(name, here) if Path(name).is_relative_to(here) else name


def _difference_of_two(
    ranks: list[int], value: str | bytes | None, others: list[int], other: str | bytes | None
) -> str:
    """Return a text that shows how the `value` of `ranks` and the `other` of the ranks `others` differ."""
    if isinstance(value, bytes) and isinstance(other, bytes):
        try:
            return _difference_of_two(ranks, value.decode(), others, other.decode())
        except UnicodeDecodeError:
            length = min(len(value), len(other))
            first = next((at for at in range(length) if value[at] != other[at]), length)
            difference = f"{ranks_text(others)}: {len(other)} bytes, differs from byte {first} on"
            return f"{ranks_text(ranks)}: {len(value)} bytes\n{difference}"
    if not (isinstance(value, str) and isinstance(other, str)):
        return f"{ranks_text(ranks)}: {_about(value)}\n{ranks_text(others)}: {_about(other)}"
    old, new = value.splitlines(), other.splitlines()
    lines = list(difflib.unified_diff(old, new, ranks_text(ranks), ranks_text(others), lineterm="", n=2))
    if not lines:
        return f"{ranks_text(ranks)} and {ranks_text(others)} differ in line endings only"
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... {len(lines) - _MOST_LINES} more lines"]
    return "\n".join(lines)


def _about(value: str | bytes | None) -> str:
    return "no value" if value is None else f"{len(value)} {'characters' if isinstance(value, str) else 'bytes'}"
