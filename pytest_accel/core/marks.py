"""The marks `devices` and `distributed`: their lines for ``--markers``, and lookup of the marks of a test."""

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
"""Lines that ``pytest --markers`` shows, for ``config.addinivalue_line("markers", ...)``."""


class Marks(NamedTuple):
    """The marks that apply to a test: the closest mark of each name, or None."""

    devices: pytest.Mark | None = None
    distributed: pytest.Mark | None = None


def foreign_marks(lines: Iterable[str]) -> dict[str, str]:
    """Return the marks of this plugin that others have registered too, each with the plugin's effect on marked tests.

    `lines` is the value of the ini setting ``markers``: each has a name, optional arguments, a colon and a text.
    """
    names = {re.split(r"[:(]", line, maxsplit=1)[0].strip() for line in lines if line not in MARKER_LINES}
    effects = {"devices": "runs tests with leased devices", "distributed": "runs tests in ranks"}
    return {name: effects[name] for name in sorted(names & effects.keys())}


class MarkFinder:
    """Finds the closest marks of each test. There may be thousands of tests without marks; they cost almost nothing.

    The marks of modules, classes and packages are read once, when the first of their tests is looked up. The finder
    does not see marks that a hook adds to them afterwards. Marks of the tests themselves are always read.

    A parameter is closer than its function, and a class is closer than its bases. (pytest's own ``get_closest_marker``
    orders both pairs the other way round.) If a function has several marks of one name, the first counts, as everywhere
    in pytest: the lowest decorator, then marks that a hook adds with ``item.add_marker``. A hook can put its mark first
    with ``append=False``.
    """

    def __init__(self) -> None:
        self._marks_by_node: dict[pytest.Collector | pytest.Item, Marks] = {}
        self._last_parent: object = None
        self._last_inherited = Marks()

    def find(self, item: pytest.Item) -> Marks:
        """Return the closest marks of `item`, which may be a ``metafunc.definition``."""
        parent: Any = item.parent
        # Tests arrive grouped by module and class, so the parent is usually that of the previous test.
        if parent is not self._last_parent:
            self._last_inherited = self._marks_of(parent)
            self._last_parent = parent
        own = item.own_markers
        if not own:
            return self._last_inherited
        # Only parametrized functions have a callspec. own_markers holds its marks too, but after the function's.
        callspec = getattr(item, "callspec", None)
        return _closest((*callspec.marks, *own) if callspec is not None else own, self._last_inherited)

    def _marks_of(self, node: Any) -> Marks:
        """Return the closest marks of the collector `node`, including inherited ones."""
        if node is None:
            return Marks()
        marks = self._marks_by_node.get(node)
        if marks is None:
            # own_markers of a class lists the marks of its bases before its own.
            own = reversed(node.own_markers) if isinstance(node, pytest.Class) else node.own_markers
            marks = self._marks_by_node[node] = _closest(own, self._marks_of(node.parent))
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
