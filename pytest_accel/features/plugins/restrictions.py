"""Uses of plugins that ranks must not make, since all ranks of a test would make them at the same time.

A rank calls these functions when all plugins have been configured; they may return a plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from pytest_accel.compat.pytest_shims import base_temporary_directory
from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins.rows import named
from pytest_accel.rank.context import RANK


def _failing(text: str) -> Callable[..., NoReturn]:
    def fail(*args: object, **kwargs: object) -> NoReturn:
        __tracebackhide__ = True
        pytest.fail(text, pytrace=False)

    return fail


def approvaltests(config: pytest.Config) -> None:
    """Let only rank 0 verify: a rank could remove the received file of another rank before this compares."""
    text = "verify() of ApprovalTests works in rank 0 alone: all ranks would write the same files; use `if rank == 0:`"
    approver = named("approvaltests.file_approver", "FileApprover")
    approver.verify = staticmethod(_failing(text)) if config.stash[RANK].rank else approver.verify


def inline_snapshot(config: pytest.Config) -> None:
    """Each rank compares, as an xdist worker does, and keeps temporary files where its own are."""
    state = named("inline_snapshot._global_state", "state")()
    state.active = False
    if state.tmp_dir is not None:
        state.tmp_dir.cleanup()
        state.tmp_dir = TemporaryDirectory(prefix="inline-snapshot-", dir=base_temporary_directory(config))


def pytest_dependency(config: pytest.Config) -> None:
    """A rank does not know the outcomes of other tests."""
    text = "depends() of pytest-dependency does not work in a rank: use @pytest.mark.dependency(depends=[...]) instead"
    named("pytest_dependency", "DependencyManager").checkDepend = _failing(text)


def pytest_recording(config: pytest.Config) -> object:
    """Rank 0 records cassettes, and all ranks replay them."""

    class ReadOnly:
        @pytest.hookimpl(trylast=True, optionalhook=True)
        def pytest_recording_configure(self, vcr: Any) -> None:
            vcr.persister.save_cassette = lambda *args, **options: None

    return ReadOnly() if config.stash[RANK].rank else None


def pytest_snapshot(config: pytest.Config) -> None:
    """Rank 0 updates snapshots. The other ranks do not compare meanwhile."""
    snapshot = named("pytest_snapshot.plugin", "Snapshot")
    for name in ("assert_match", "assert_match_dir"):
        if config.option.snapshot_update and config.stash[RANK].rank:
            pytest.MonkeyPatch().setattr(snapshot, name, lambda *args: None)


class OwnDatabases:
    """pytest-django: each rank has test databases of its own."""

    def __init__(self, config: pytest.Config) -> None:
        context = config.stash[RANK]
        self._add_suffix = named("pytest_django.fixtures", "_set_suffix_to_test_databases")
        self._suffix = f"w{context.spec.world}r{context.rank}"

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.argname == "django_db_modify_db_settings_xdist_suffix":
            result = yield
            self._add_suffix(self._suffix)  # pytest-django appends the name of an xdist worker in the same way.
            return result
        if fixturedef.argname != "django_db_setup":
            return (yield)
        # pytest-django creates the databases that `session.items` use; a rank has only some of the session's tests.
        items = request.session.items
        request.session.items = [*items, _UsesEverything()]  # type: ignore[list-item]
        try:
            return (yield)
        finally:
            request.session.items = items


class _UsesEverything:
    """A stand-in for a test that uses all databases, with serialized rollback."""

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        mark = pytest.mark.django_db(databases="__all__", serialized_rollback=True).mark
        return mark if name == "django_db" else None


def syrupy(config: pytest.Config) -> object:
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
    return _SyrupyInRank(session)


class _SyrupyInRank:
    def __init__(self, session: Any) -> None:
        self._session, self._flush = session, session.flush_snapshot_write_queue

    def send(self, item: pytest.Item, report: pytest.TestReport) -> list[str]:
        """Store what the phase has changed; return the files beside which syrupy has left lock files."""
        self._flush()
        return sorted(vars(self._session).get("_written_snapshot_locations", ()))


class SyrupyInDriver:
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
