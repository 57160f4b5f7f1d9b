"""Uses of plugins that ranks must not make, since all ranks of a test would make them at the same time.

A rank calls these functions when all plugins have been configured; they may return a plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import pytest

from pytest_accel.compat.pytest_shims import base_temporary_directory
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
