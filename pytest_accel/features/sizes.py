"""Marks with lists of world sizes and backends.

Each entry of a list becomes a test: a copy of pytest's item with an id of its own, and with the chosen entries in its
stash (`VARIANT`). Pytest's own parametrization knows functions only, and no mark of a parameter or a hook. Ranks
collect the test as it is, and run it by the name that the driver sends.

The kernel checks the arguments (`core/marks.py`), and plans with the chosen entries (`driver/item_plan.py`).

Tests: ``tests/features/sizes``. Page: ``docs/reference/marks.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby, product
from typing import Any

import pytest

from pytest_accel.compat.pytest_shims import copy_item
from pytest_accel.core.marks import MarkError, check, closest_marks, own_world_size
from pytest_accel.core.node_refs import give_new_stash, reference
from pytest_accel.core.stash_keys import OWNERS, VARIANT


def pytest_accel_divide(config: pytest.Config, nodes: list[Any], selectable: bool) -> None:
    """Put a copy for each entry of the lists in a mark in place of each test that was not divided before.

    Adjacent tests of one function are ordered by entry: tests in worlds of one size are best run one after the other.
    """
    owners, divided = config.stash[OWNERS], []
    for _, group in groupby(nodes, key=lambda node: (node.parent, getattr(node, "originalname", node.name))):
        made = [one for node in group for one in _variants(node, closest_marks(node, owners).distributed, selectable)]
        ids = list(dict.fromkeys(variant for variant, _ in made))
        divided += [node for _, node in sorted(made, key=lambda one: ids.index(one[0]))]
    for item in set(nodes).difference(divided):  # Not earlier: another plugin's copy has the same stash.
        item.stash[VARIANT] = None
    nodes[:] = divided


def _variants(node: Any, mark: pytest.Mark | None, selectable: bool) -> Iterator[tuple[str, Any]]:
    """Yield the part of the id and a copy of `node` for each combination of entries; `node` itself if it has no lists.

    A parameter ``world_size`` of the test itself chooses among the sizes.
    """
    lists: dict[str, list[object]] = {}
    if mark is not None and isinstance(node, pytest.Item) and VARIANT not in node.stash:
        with suppress(MarkError):  # Wrong marks are reported together after collection.
            given = check(mark)
            lists = {name: given[name] for name in ("world_size", "backend") if isinstance(given.get(name), list)}
        if own_world_size(node) is not None:
            lists.pop("world_size", None)
    if not lists:
        yield "", node
        return
    for entries in product(*lists.values()):
        chosen = dict(zip(lists, entries, strict=True))
        variant = "-".join(f"{name}={entry}" for name, entry in chosen.items())
        base, bracket, parameters = node.name.partition("[")
        name = f"{base}[{variant}-{parameters}" if bracket else f"{base}[{variant}]"
        copied = copy_item(node, name, name.join(node.nodeid.rsplit(node.name, 1)))
        give_new_stash(copied)
        copied.stash[VARIANT] = chosen, name if selectable else reference(node).names[-1]
        yield variant, copied
