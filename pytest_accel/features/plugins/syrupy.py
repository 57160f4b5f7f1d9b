"""syrupy: rank 0 stores what a test changes. The other ranks compare, but not while snapshots are updated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins.rows import named
from pytest_accel.rank.context import RANK


def in_rank(config: pytest.Config) -> object:
    """Return the plugin that stores snapshots in this rank."""
    # syrupy listens to reports, so a rank does not call its pytest_sessionstart, which makes its session.
    plugin: Any = config.pluginmanager.get_plugin("syrupy")
    with pytest.MonkeyPatch.context() as patch:
        if not config.stash[RANK].session.distributed:
            # Workers of xdist lock the files that they write. Without xdist, nothing would delete the lock files.
            patch.delenv("PYTEST_XDIST_WORKER", raising=False)
        plugin.pytest_sessionstart(SimpleNamespace(config=config))
    session: Any = vars(config)["_syrupy"]
    replaced = {"register_request": None, "finish": 0}
    if session.update_snapshots and config.stash[RANK].rank:
        replaced |= {"recall_snapshot": None, "queue_snapshot_write": None}
    for name, result in replaced.items():
        # A release without the name is unknown: this raises an error.
        pytest.MonkeyPatch().setattr(session, name, lambda *args, result=result, **named: result)
    return _InRank(session)


class _InRank:
    def __init__(self, session: Any) -> None:
        self._session, self._flush = session, session.flush_snapshot_write_queue

    def send(self, item: pytest.Item, report: pytest.TestReport) -> list[str]:
        """Store what the phase has changed; return the files beside which syrupy has left lock files."""
        self._flush()
        return sorted(vars(self._session).get("_written_snapshot_locations", ()))


class InDriver:
    """Tells the driver's session that marked tests were skipped: it keeps their snapshots, and does not count them.

    That session also deletes syrupy's lock files at its end.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._ran_item = named("syrupy.session", "SnapshotSession").ran_item
        self._config: Any = config
        self._marked: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if MARKED in item.stash:
            self._marked.add(item.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self._marked:
            self._ran_item(self._config._syrupy, report.nodeid, "skipped")

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, list[str]]) -> None:
        if sent.get(0):
            self._config._syrupy.add_written_snapshot_locations(sent[0])
