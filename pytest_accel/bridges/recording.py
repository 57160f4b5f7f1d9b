"""pytest-recording: all ranks replay a cassette, and rank 0 records it."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.stash import RANK


def rank_plugin(config: pytest.Config) -> object | None:
    from pytest_recording import _vcr

    original = _vcr.use_cassette

    def use_cassette(
        default_cassette: str, directory: str, record_mode: str, markers: Any, vcr_config: Any, pytestconfig: Any
    ) -> Any:
        __tracebackhide__ = True
        if _vcr.merge_kwargs(vcr_config, markers).get("record_mode", record_mode) == "rewrite":
            pytest.fail(
                "pytest-recording's record mode `rewrite` does not work in ranks, which would remove what another has "
                "recorded: remove the cassettes, and record with --record-mode=once",
                pytrace=False,
            )
        return original(default_cassette, directory, record_mode, markers, vcr_config, pytestconfig)

    _vcr.use_cassette = use_cassette
    return _Reader() if config.stash[RANK].rank else None


class _Reader:
    """Keeps a rank from writing cassettes."""

    @pytest.hookimpl(trylast=True)
    def pytest_recording_configure(self, vcr: Any) -> None:
        vcr.persister.save_cassette = _save_nothing


def _save_nothing(*args: object, **kwargs: object) -> None:
    pass
