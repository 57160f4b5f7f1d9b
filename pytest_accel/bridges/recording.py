"""pytest-recording: all ranks replay a cassette, and rank 0 records it."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.bridges.internals import take
from pytest_accel.rank.context import RANK


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that keeps ranks from changing cassettes that other ranks use."""
    return _Rank(config.stash[RANK].rank)


def driver_plugin(config: pytest.Config) -> None:
    """Refuse a release whose record mode cannot be determined in ranks."""
    _merge()


def _merge() -> Any:
    """Return pytest-recording's function that merges the configuration of a test with its marks."""
    return take("pytest-recording", "pytest_recording.utils", "merge_kwargs")


class _Rank:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
        """Fail a test that would remove its cassette: another rank may have recorded it already."""
        __tracebackhide__ = True
        markers = list(request.node.iter_markers("vcr")) if fixturedef.argname == "vcr" else []
        if not markers or request.getfixturevalue("disable_recording"):
            return
        configuration = _merge()(request.getfixturevalue("vcr_config"), markers)
        if configuration.get("record_mode", request.getfixturevalue("record_mode")) == "rewrite":
            pytest.fail(
                "pytest-recording's record mode `rewrite` does not work in ranks, which would remove what another has "
                "recorded: remove the cassettes, and record with --record-mode=once",
                pytrace=False,
            )

    @pytest.hookimpl(trylast=True, optionalhook=True)
    def pytest_recording_configure(self, vcr: Any) -> None:
        if self._rank:
            vcr.persister.save_cassette = _save_nothing


def _save_nothing(*args: object, **kwargs: object) -> None:
    """Stand in for the function of a persister that writes a cassette."""
