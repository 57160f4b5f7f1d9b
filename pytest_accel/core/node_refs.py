"""References by which a driver and its ranks mean the same test, although each collects the files itself.

A name does not identify a test: two parameter sets may have one id, a collector may give several items one name, and
plugins rename items. So a reference has, for each node between the file and the test, the name under which it was
collected and its place among the nodes that could be taken for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import pytest

from pytest_accel.core.source_files import PLACE
from pytest_accel.core.stash_keys import VARIANT


class NodePlace(NamedTuple):
    """The place of a node among the children of its collector.

    The places of a node in two processes are equal only if both have collected the same family: the children made of
    the same function or, if they are not made of functions, of the same name.
    """

    name: str
    """The name of the node when it was collected."""
    turn: int = 0
    """Number of earlier members of the family with this name."""
    members: int = 0
    """Number of children in the family; 0 for a node that no collector has returned."""
    digest: str = ""
    """Digest of the family's function and names. Their order counts only if the names do not tell the members apart."""


TestFamily = tuple[str, ...]
"""The tests that a collector has made of the same function; see `NodeRef.family`."""


def without_parameters(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the `names` of a test's nodes without the parameters of the last node."""
    return (*names[:-1], names[-1].partition("[")[0])


class NodeRef(NamedTuple):
    """A reference to a test: the file to collect, and the places of its nodes in that file."""

    path: str
    collector: str
    """Class of the node of the file: several plugins may collect tests from one file."""
    places: tuple[NodePlace, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes below the file, down to the test itself."""
        return tuple(place.name for place in self.places)

    @property
    def family(self) -> TestFamily:
        """A value that the references to all tests of a function share. It is made of the names of all these tests.

        So a process that has collected this family has collected each of its tests.
        """
        return (self.collector, *(place.digest or place.name for place in self.places))


def places(names: Sequence[str], families: Sequence[str]) -> list[NodePlace]:
    """Return the places of all children of a collector, which have these `names` and are in these `families`."""
    members: dict[str, list[str]] = {}
    for name, family in zip(names, families, strict=True):
        members.setdefault(family, []).append(name)
    digests = {family: _digest(family, own) for family, own in members.items()}
    turns: Counter[tuple[str, str]] = Counter()
    found: list[NodePlace] = []
    for name, family in zip(names, families, strict=True):
        found.append(NodePlace(name, turns[family, name], len(members[family]), digests[family]))
        turns[family, name] += 1
    return found


def reference(item: pytest.Item) -> NodeRef:
    """Return the reference to `item`."""
    chain: list[Any] = item.listchain()
    # An item of an old plugin may be a file itself.
    index = next((index for index, node in enumerate(chain[:-1]) if isinstance(node, pytest.File)), 0)
    file, *nodes = chain[index:]
    kind = type(file)
    return NodeRef(str(item.path), f"{kind.__module__}.{kind.__qualname__}", tuple(map(_place, nodes)))


def are_copies(item: pytest.Item, other: pytest.Item) -> bool:
    """Return whether an item is a copy of the other, as some plugins make them; False if unknown."""
    place = item.stash.get(PLACE, None)
    return place is not None and place is other.stash.get(PLACE, None)


def give_new_stash(item: pytest.Item) -> None:
    """Give a copied item, which shares the stash of the original, a stash of its own with its place and variant."""
    shared, item.stash = item.stash, pytest.Stash()
    for key in (PLACE, VARIANT):
        if key in shared:
            item.stash[key] = shared[key]


def _place(node: pytest.Item | pytest.Collector) -> NodePlace:
    recorded = node.stash.get(PLACE, None)
    if recorded is None:
        return NodePlace(node.name)
    children, index = recorded
    if children.places is None:
        children.places = places(children.names, children.families)
    found: NodePlace = children.places[index]
    return found


def _digest(family: str, names: list[str]) -> str:
    """Return the digest of a family, which has these `names`.

    Parameters from a set have another order in each process. That does no harm if their ids differ.
    """
    in_order = names if len(set(names)) < len(names) else sorted(names)
    return blake2b(ascii((family, *in_order)).encode(), digest_size=8).hexdigest()
