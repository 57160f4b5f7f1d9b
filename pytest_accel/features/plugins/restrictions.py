"""Uses of plugins that ranks must not make, since all ranks of a test would make them at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins.rows import named
from pytest_accel.rank.context import RANK


def _failing(text: str) -> Callable[..., NoReturn]:
    def fail(*args: object, **kwargs: object) -> NoReturn:
        __tracebackhide__ = True
        pytest.fail(text, pytrace=False)

    return fail


def approvaltests(config: pytest.Config) -> None:
    """Only rank 0 verifies: a rank could remove the received file of another one before that compares."""
    text = (
        "ApprovalTests' verify() works in rank 0 alone, since all ranks would write the same files: "
        "use `if rank == 0: verify(...)`"
    )
    approver = named("approvaltests.file_approver", "FileApprover")
    assert approver.verify
    if config.stash[RANK].rank:
        approver.verify = staticmethod(_failing(text))


def pytest_dependency(config: pytest.Config) -> None:
    """A rank does not know the outcomes of other tests."""
    text = (
        "pytest_dependency.depends() does not work in a rank, which does not know the outcomes of other tests: "
        "mark the test with @pytest.mark.dependency(depends=[...]) instead"
    )
    named("pytest_dependency", "DependencyManager").checkDepend = _failing(text)


def pytest_memray(config: pytest.Config) -> object:
    """Each rank judges its limits by recordings in a folder of its own, which is emptied before the next test."""
    manager: Any = config.pluginmanager.get_plugin("memray_manager")
    context = config.stash[RANK]
    if manager._tmp_dir is not None:
        manager._tmp_dir.cleanup()
    manager.result_path = Path(context.session.directory, f"w{context.spec.world}r{context.rank}.memray")
    manager.result_metadata_path = manager.result_path / "metadata"
    manager.result_metadata_path.mkdir(parents=True)

    class Emptied:
        @pytest.hookimpl(trylast=True)
        def pytest_runtest_teardown(self) -> None:
            for path in manager.result_path.rglob("*.*"):
                path.unlink()
            manager.results.clear()

    return Emptied()


def pytest_recording(config: pytest.Config) -> object:
    """Rank 0 records cassettes, and all ranks replay them."""

    class ReadOnly:
        @pytest.hookimpl(trylast=True, optionalhook=True)
        def pytest_recording_configure(self, vcr: Any) -> None:
            vcr.persister.save_cassette = lambda *args, **options: None

    return ReadOnly() if config.stash[RANK].rank else None


RESTRICTIONS: dict[str, Callable[[pytest.Config], object]] = {
    "approvaltests.integrations.pytest.pytest_plugin": approvaltests,
    "pytest_dependency": pytest_dependency,
    "memray_manager": pytest_memray,
    "pytest_recording.plugin": pytest_recording,
}
"""The functions for plugins, which a rank calls when all plugins have been configured. They may return a plugin."""


def keep_from_forking(config: pytest.Config) -> None:
    """Keep pytest-forked from forking the driver for a marked test, which runs in other processes anyway."""
    for implementation in config.hook.pytest_runtest_protocol.get_hookimpls():
        if getattr(implementation.plugin, "__name__", None) == "pytest_forked":
            implementation.function = _unless_marked(implementation.function)  # type: ignore[misc]


def _unless_marked(protocol: Callable[..., object]) -> Callable[..., object]:
    def run(item: pytest.Item, nextitem: pytest.Item | None) -> object:
        return None if MARKED in item.stash else protocol(item, nextitem)

    return run
