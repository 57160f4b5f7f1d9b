"""pytest-run-parallel: a marked test has one thread in each rank, and the plugin's report says so.

Threads of a rank would issue the collectives of one process group in an order that differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_accel.stash import MARKED


def rank_plugin(config: pytest.Config) -> object:
    return _Rank()


def driver_plugin(config: pytest.Config) -> object:
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
