"""pytest-recording: all ranks replay a cassette, and rank 0 records it."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.features.plugins.refusals import marked
from pytest_accel.features.plugins.unknown_releases import WithoutBridge
from pytest_accel.rank.context import RANK

WITHOUT = WithoutBridge(
    "pytest-recording", damage="ranks would overwrite each other's cassettes", applies=marked("vcr")
)


def plugin(config: pytest.Config) -> object | None:
    """Return the plugin that keeps ranks from changing cassettes that other ranks use; None in the driver."""
    return _OneRecorder(config.stash[RANK].rank) if RANK in config.stash else None


class _OneRecorder:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
        """Fail a test that would remove its cassette: another rank may have recorded it already."""
        __tracebackhide__ = True
        markers = list(request.node.iter_markers("vcr")) if fixturedef.argname == "vcr" else []
        if not markers or request.getfixturevalue("disable_recording"):
            return
        configuration: dict[str, Any] = dict(request.getfixturevalue("vcr_config"))
        for mark in reversed(markers):  # The closest mark counts.
            configuration |= mark.kwargs
        if configuration.get("record_mode", request.getfixturevalue("record_mode")) == "rewrite":
            pytest.fail(
                "pytest-recording's record mode `rewrite` does not work in ranks: each would remove the recordings of "
                "the others; remove the cassettes, and record with --record-mode=once",
                pytrace=False,
            )

    @pytest.hookimpl(trylast=True, optionalhook=True)
    def pytest_recording_configure(self, vcr: Any) -> None:
        if self._rank:
            vcr.persister.save_cassette = lambda *_, **__: None
