"""pytest-run-parallel: a marked test runs in one thread of each rank, and the plugin reports it as thread-unsafe.

Several threads would issue the collectives of one process group in an order that differs between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_accel.core.stash_keys import MARKED


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that marks all tests of a rank as thread-unsafe."""
    return _Rank()


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that marks marked tests as thread-unsafe for pytest-run-parallel's report."""
    return _Driver()


class _Rank:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        _mark(session.items)


class _Driver:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        _mark(item for item in session.items if MARKED in item.stash)


def _mark(items: Iterable[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.thread_unsafe(reason="runs in ranks"))
