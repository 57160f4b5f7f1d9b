"""The marks `devices` and `distributed`: how ``--markers`` shows them, and which of them hold for a test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

MARKER_LINES = (
    "devices(n=1, *, kind=None, memory=None, capability=None, name=None, share=None, near=None, fresh=False): "
    "run the test in one process that sees exactly n devices, all of which fit the filters.",
    "distributed(world_size=2, *, nodes=None, backend=None, device=None, devices_per_rank=1, init=True, timeout=None, "
    "fresh=False, visible='world', env=None, launcher=None): "
    "run the whole test in every one of world_size ranks; a list of world sizes parametrizes.",
)
"""The marks as ``pytest --markers`` shows them, for ``config.addinivalue_line("markers", ...)``."""


class Marks(NamedTuple):
    """The marks that hold for a test: of each name the closest, None where there is none."""

    devices: pytest.Mark | None = None
    distributed: pytest.Mark | None = None


def foreign_marks(lines: Iterable[str]) -> dict[str, str]:
    """What the plugin does to tests with a mark that others, too, have registered, by the mark's name.

    `lines` are those of the ini setting ``markers``: a name, perhaps with arguments, a colon and a text.
    """
    names = {re.split(r"[:(]", line, maxsplit=1)[0].strip() for line in lines if line not in MARKER_LINES}
    does = {"devices": "runs tests with leased devices", "distributed": "runs tests in ranks"}
    return {name: does[name] for name in sorted(names & does.keys())}


class MarkFinder:
    """Finds each test's closest marks, at next to no cost for the thousands of tests that have none.

    The marks of modules, classes and packages are read once, when the first of their tests is looked up, so a finder
    does not see those that a hook adds to them afterwards. Marks of the tests themselves are always read.

    A parameter is closer than its function and a class than its bases. (pytest's own ``get_closest_marker`` has these
    two the other way round.) Of several marks of one name on one function the first counts, as everywhere in pytest:
    the lowest decorator, before what a hook adds with ``item.add_marker``, unless that is told ``append=False``.
    """

    def __init__(self) -> None:
        self._known: dict[pytest.Collector | pytest.Item, Marks] = {}
        self._parent: object = None
        self._inherited = Marks()

    def find(self, item: pytest.Item) -> Marks:
        """The closest marks of `item` (or of a ``metafunc.definition``)."""
        parent: Any = item.parent
        # Tests come by module and class, so that this is most often the parent of the one before.
        if parent is not self._parent:
            self._inherited = self._of(parent)
            self._parent = parent
        own = item.own_markers
        if not own:
            return self._inherited
        # callspec is there on parametrized functions only; its marks are among the item's own, behind the function's.
        callspec = getattr(item, "callspec", None)
        return _closest((*callspec.marks, *own) if callspec is not None else own, self._inherited)

    def _of(self, node: Any) -> Marks:
        if node is None:
            return Marks()
        marks = self._known.get(node)
        if marks is None:
            # A class holds the marks of its bases before its own.
            own = reversed(node.own_markers) if isinstance(node, pytest.Class) else node.own_markers
            marks = self._known[node] = _closest(own, self._of(node.parent))
        return marks


def _closest(own: Iterable[pytest.Mark], inherited: Marks) -> Marks:
    devices = distributed = None
    for mark in own:
        if mark.name == "devices":
            devices = devices or mark
        elif mark.name == "distributed":
            distributed = distributed or mark
    if devices is None and distributed is None:
        return inherited
    return Marks(devices or inherited.devices, distributed or inherited.distributed)
