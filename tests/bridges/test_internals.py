"""Tests of the checks that refuse a release of another plugin without the internals that a bridge needs."""

from __future__ import annotations

import json.decoder
from importlib.metadata import version

import pytest

from pytest_accel.bridges.internals import require, require_parameters, take


def test_release_without_a_required_name_is_refused() -> None:
    assert take("plugin", "json.decoder", "JSONDecoder") is json.decoder.JSONDecoder
    require("plugin", json.decoder, "JSONDecoder", "JSONDecodeError")
    text = "pytest-accel does not know this release of plugin, which has no Lost: install another release"
    with pytest.raises(pytest.UsageError, match=text):
        take("plugin", "json.decoder", "Lost")
    with pytest.raises(pytest.UsageError, match=text):
        require("plugin", json.decoder, "JSONDecoder", "Lost")
    with pytest.raises(pytest.UsageError, match=text):
        take("plugin", "json.absent", "Lost")


def _compare(new: object, old: object, limit: int = 3) -> None:
    """Take two required parameters and an optional one."""


def test_release_whose_function_has_other_parameters_is_refused() -> None:
    require_parameters("plugin", _compare, "new", "old")
    require_parameters("plugin", _compare, "old", "new", "limit")
    for names in (("new", "old", "first"), ("new",)):
        with pytest.raises(pytest.UsageError, match=rf"which has no _compare\({', '.join(names)}\): install"):
            require_parameters("plugin", _compare, *names)


def test_error_names_the_refused_release() -> None:
    with pytest.raises(
        pytest.UsageError, match=f"does not know release {version('pluggy')} of pluggy, which has no Lost"
    ):
        require("pluggy", pytest, "Lost")
