"""What several ranks have sent, put together: once where they sent the same, else labelled by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import pytest

from pytest_accel.stash import MARKED

Entry = TypeVar("Entry")
_PLAIN = (type(None), bool, int, float, str, bytes)


def plain(value: object) -> object:
    """Return `value` in a form that a rank may send: the text of what is not plain data."""
    if type(value) in (list, tuple):
        return [plain(part) for part in value]  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {key if type(key) in _PLAIN else str(key): plain(part) for key, part in value.items()}
    return value if type(value) in _PLAIN else str(value)


def number_of_ranks(item: pytest.Item) -> int:
    """Return how many ranks run the marked `item`."""
    return item.stash[MARKED].shape.ranks


def groups(said: Mapping[int, Sequence[Entry]], key: Callable[[Entry], str] = repr) -> list[dict[int, Entry]]:
    """Return the entries of all ranks: for each group of entries that are the same, each rank's own.

    Entries are the same if `key` gives the same text. What a rank has sent twice is in two groups. The groups are in
    the order in which each rank has sent its entries, as far as that is one order.
    """
    found: dict[tuple[str, int], dict[int, Entry]] = {}
    places: dict[tuple[str, int], int] = {}
    for rank, entries in sorted(said.items()):
        times: Counter[str] = Counter()
        for place, entry in enumerate(entries):
            text = key(entry)
            times[text] += 1
            same = text, times[text]
            found.setdefault(same, {})[rank] = entry
            places[same] = max(places.get(same, 0), place)
    return [found[same] for same in sorted(found, key=lambda same: places[same])]


def label(those: Mapping[int, object], ranks: int) -> str:
    """Return what to append to a name for `those` of the `ranks`: nothing if they are all, else e.g. `` [rank 0]``."""
    if len(those) == ranks:
        return ""
    from pytest_accel.accounts import ranks_text  # A rank, which merges nothing, need not import it.

    return f" [{ranks_text(list(those))}]"


def once(
    said: Mapping[int, Sequence[Entry]], ranks: int, key: Callable[[Entry], str] = repr
) -> list[tuple[str, Entry]]:
    """Return each entry that ranks have sent once, behind its label."""
    return [(label(group, ranks), next(iter(group.values()))) for group in groups(said, key)]


def by_name(said: Mapping[int, Mapping[str, Entry]]) -> dict[str, Entry]:
    """Return the values that ranks have sent by name: one where those that sent it agree, else one for each rank."""
    values: dict[str, list[tuple[int, Entry]]] = {}
    for rank, named in sorted(said.items()):
        for name, value in named.items():
            values.setdefault(name, []).append((rank, value))
    merged: dict[str, Entry] = {}
    for name, sent in values.items():
        if all(value == sent[0][1] for _, value in sent):
            merged[name] = sent[0][1]
        else:
            merged |= {f"{name} [rank {rank}]": value for rank, value in sent}
    return merged
