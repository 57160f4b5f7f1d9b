"""pytest-run-parallel: a marked test runs in one thread of each rank, and the plugin reports it as thread-unsafe.

Several threads would issue the collectives of one process group in an order that differs between ranks.
"""

from __future__ import annotations

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.rank.context import RANK


def plugin(config: pytest.Config) -> object:
    """Return the plugin that marks all tests of a rank, and the driver's marked tests, as thread-unsafe."""
    return _ThreadUnsafe()


class _ThreadUnsafe:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if RANK in session.config.stash or MARKED in item.stash:
                item.add_marker(pytest.mark.thread_unsafe(reason="runs in ranks"))
