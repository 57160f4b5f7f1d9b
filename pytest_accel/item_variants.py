"""Division of a test whose mark has lists into variants, an item for each. Imported when the first such test is found.

Only the process that reports the tests divides them. Its ranks collect the test as it is, and run it under the name of
the variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, groupby
from typing import Any

import pytest

from pytest_accel.core.marks import DividedItem, Variant
from pytest_accel.core.node_refs import give_new_stash
from pytest_accel.core.shims import copy_item
from pytest_accel.core.stash_keys import VARIANT


def divide(nodes: Sequence[Any], found: Mapping[pytest.Item, Sequence[Variant]], *, selectable: bool) -> Iterator[Any]:
    """Yield `nodes` with the variants in `found` in place of the items that have any.

    Adjacent items of one function are ordered by variant: tests in worlds of one size are best run one after the other.
    `selectable` is True if pytest compares the names with those of the command line afterwards.
    """
    taken = {node.nodeid for node in nodes if node not in found}
    functions = {item: (item.parent, getattr(item, "originalname", item.name)) for item in found}
    for divided, group in groupby(nodes, key=functions.get):
        members = list(group)
        if divided is None:
            yield from members
            continue
        for variant in dict.fromkeys(one for item in members for one in found[item]):
            for item in members:
                if variant in found[item]:
                    yield _variant(item, variant, taken, selectable=selectable)


def _variant(item: pytest.Item, variant: Variant, taken: set[str], *, selectable: bool) -> pytest.Item:
    """Return a copy of `item` for `variant`, with a node id that is not in `taken`, and add its id there."""
    ids = chain([variant.id], (f"{variant.id}_{number}" for number in count(1)))
    named = ((_with(item, item.name, one), _with(item, item.nodeid, one)) for one in ids)
    name, nodeid = next((name, nodeid) for name, nodeid in named if nodeid not in taken)
    taken.add(nodeid)
    copied: pytest.Item = copy_item(item, name, nodeid)
    give_new_stash(copied)
    copied.stash[VARIANT] = DividedItem(variant, name, nodeid, selectable)
    item.stash[VARIANT] = None
    return copied


def _with(item: pytest.Item, name: str, variant: str) -> str:
    """Return `name`, the name or the node id of `item`, with the id of a variant before the ids of its parameters."""
    base = f"{getattr(item, 'originalname', '')}["
    parameters = item.name.removeprefix(base) if hasattr(item, "callspec") else item.name
    if parameters == item.name or not name.endswith(item.name):
        return f"{name}[{variant}]"
    return f"{name.removesuffix(parameters)}{variant}-{parameters}"
