"""The choice of the tests that this session runs: ``--accel-select``, and what ``-m`` finds in the plugin's marks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.marks import MarkError, Marks, as_keywords
from pytest_accel.core.needs import Needs
from pytest_accel.hardware.registry import VendorError
from pytest_accel.settings import select_expression

if TYPE_CHECKING:
    from pytest_accel.item_redirection import Redirector

_UNMARKED = Needs()


def deselect(config: pytest.Config, items: list[pytest.Item], selected: Callable[[pytest.Item], bool]) -> None:
    """Remove the tests that are not `selected` from `items`, and tell pytest so."""
    chosen = {item for item in items if selected(item)}
    removed = [item for item in items if item not in chosen]
    if removed:
        items[:] = [item for item in items if item in chosen]
        config.hook.pytest_deselected(items=removed)


def by_needs(condition: str, found: dict[pytest.Item, Marks], redirector: Redirector) -> Callable[[pytest.Item], bool]:
    """Return a function that says whether a test meets `condition`; `found` has the marks of the marked tests.

    A test with wrong marks meets every condition: it is reported when it is redirected.
    """
    meets = select_expression.parse(condition)

    def selected(item: pytest.Item) -> bool:
        marks = found.get(item)
        try:
            return meets(_UNMARKED if marks is None else redirector.needs(item, marks))
        except (MarkError, VendorError):
            return True

    return selected


def name_arguments(items: Iterable[pytest.Item]) -> None:
    """Give the plugin's marks of `items` their first argument by name: ``-m`` compares only named arguments."""
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers[:] = [as_keywords(mark) for mark in node.own_markers]
