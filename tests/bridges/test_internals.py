"""Tests of the checks that find a release of another plugin without the internals that a bridge needs."""

from __future__ import annotations

import json.decoder
from importlib.metadata import version
from pathlib import Path

import pytest

from pytest_accel.features.plugins import BRIDGES
from pytest_accel.features.plugins.internals import UnknownReleaseError, require, require_parameters, take
from pytest_accel.features.plugins.unknown_releases import CONSEQUENCES, about


def test_release_without_a_required_name_is_found() -> None:
    assert take("json.decoder", "JSONDecoder") is json.decoder.JSONDecoder
    require(json.decoder, "JSONDecoder", "JSONDecodeError")
    with pytest.raises(UnknownReleaseError, match="Lost"):
        take("json.decoder", "Lost")
    with pytest.raises(UnknownReleaseError, match="Lost"):
        require(json.decoder, "JSONDecoder", "Lost")
    with pytest.raises(UnknownReleaseError, match="Lost"):
        take("json.absent", "Lost")


def _compare(new: object, old: object, limit: int = 3) -> None:
    """Take two required parameters and an optional one."""


def test_release_whose_function_has_other_parameters_is_found() -> None:
    require_parameters(_compare, "new", "old")
    require_parameters(_compare, "old", "new", "limit")
    for names in (("new", "old", "first"), ("new",)):
        with pytest.raises(UnknownReleaseError, match=rf"^_compare\({', '.join(names)}\)$"):
            require_parameters(_compare, *names)


def test_text_names_the_plugin_and_its_release() -> None:
    known = version("hypothesis")
    text = about("hypothesis_results", UnknownReleaseError("a, b"))
    assert text == f"pytest-accel does not know release {known} of hypothesis, which has no a, b"
    text = about("hypothesis_results", KeyError("c"))
    assert text == f"pytest-accel does not know release {known} of hypothesis (KeyError: 'c')"


def test_each_bridge_has_a_consequence() -> None:
    """That to pytest's own report has none: its errors are those of this plugin."""
    assert CONSEQUENCES.keys() == set(BRIDGES.values()) - {"junit"}
    assert all(one.missing or one.damage for one in CONSEQUENCES.values())


def test_the_reference_has_the_consequence_of_each_unknown_release() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "plugins.md").read_text(encoding="utf-8")
    table = page.partition("## Releases that pytest-accel does not know")[2].partition("| --- ")[2].splitlines()
    rows = {
        cells[1]: cells[2:4] for cells in ([cell.strip() for cell in line.split("|")] for line in table) if cells[1:]
    }
    assert {one.plugin for one in CONSEQUENCES.values()} == {name for name in rows if not name.startswith("-")}
    for one in CONSEQUENCES.values():
        missing, refused = rows[one.plugin]
        assert missing == one.missing
        assert refused.endswith(f": {one.damage}" if one.damage else "")
        assert bool(refused) == bool(one.damage)
