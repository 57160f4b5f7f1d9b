"""What bridges take of other plugins' internals is refused where it is absent."""

from __future__ import annotations

import json.decoder
from importlib.metadata import version

import pytest

from pytest_accel.bridges.internals import require, take


def test_a_release_without_what_a_bridge_needs_is_refused() -> None:
    assert take("plugin", "json.decoder", "JSONDecoder") is json.decoder.JSONDecoder
    require("plugin", json.decoder, "JSONDecoder", "JSONDecodeError")
    text = "pytest-accel does not know this release of plugin, which has no Lost: install another release"
    with pytest.raises(pytest.UsageError, match=text):
        take("plugin", "json.decoder", "Lost")
    with pytest.raises(pytest.UsageError, match=text):
        require("plugin", json.decoder, "JSONDecoder", "Lost")
    with pytest.raises(pytest.UsageError, match=text):
        take("plugin", "json.absent", "Lost")


def test_the_refused_release_is_named() -> None:
    with pytest.raises(
        pytest.UsageError, match=f"does not know release {version('pluggy')} of pluggy, which has no Lost"
    ):
        require("pluggy", pytest, "Lost")
