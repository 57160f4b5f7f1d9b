"""syrupy: each rank compares with the stored snapshots, and the driver's session writes them.

For that session, marked tests are skipped ones: it keeps their snapshots, and does not count them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins.rows import named
from pytest_accel.features.plugins.snapshots import Changes, agreed, fail


def in_rank(config: pytest.Config) -> object:
    """Return the plugin that collects changes of snapshots in this rank."""
    # syrupy listens to reports, so a rank does not call its pytest_sessionstart, which makes its session.
    plugin: Any = config.pluginmanager.get_plugin("syrupy")
    plugin.pytest_sessionstart(SimpleNamespace(config=config))
    session: Any = vars(config)["_syrupy"]
    changes, recall = Changes(), session.recall_snapshot

    def name(extension: Any, test_location: Any, index: Any) -> str:
        where = {"test_location": test_location, "index": index}
        return f"{extension.get_snapshot_name(**where)!r} of {extension.get_location(**where)}"

    def recall_snapshot(extension: Any, test_location: Any, index: Any) -> Any:
        changes.compared.add(name(extension, test_location, index))
        return recall(extension, test_location, index)

    def queue_snapshot_write(extension: Any, test_location: Any, data: Any, index: Any) -> None:
        kind = type(extension)
        plain = str(data) if isinstance(data, str) else bytes(data)
        index = str(index) if isinstance(index, str) else int(index)
        change = [kind.__module__, kind.__qualname__, index, plain]
        changes.made[name(extension, test_location, index)] = change

    session.recall_snapshot, session.queue_snapshot_write = recall_snapshot, queue_snapshot_write
    session.register_request = lambda assertion: None
    session.flush_snapshot_write_queue = session.finish = lambda: 0
    return changes


def in_driver(config: pytest.Config) -> object:
    """Return the plugin that changes snapshots; raise an error for an unknown release."""
    session = named("syrupy.session", "SnapshotSession")
    for needed in ("finish", "flush_snapshot_write_queue", "queue_snapshot_write", "ran_item", "recall_snapshot"):
        getattr(session, needed)
    return _InDriver(config, named("syrupy.location", "PyTestLocation"))


class _InDriver:
    def __init__(self, config: pytest.Config, location: Any) -> None:
        self._config: Any = config
        self._location = location
        self._marked: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if MARKED in item.stash:
            self._marked.add(item.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self._marked:
            self._config._syrupy.ran_item(report.nodeid, "skipped")

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        for name, (module, qualified_name, index, data) in agreed(item, report, sent):
            extension: Any = sys.modules.get(module) or import_module(module)
            for part in qualified_name.split("."):
                extension = getattr(extension, part, None)
            if extension is None:
                text = f"{module}.{qualified_name} is not at the top level of a module"
                fail(report, f"the snapshot {name} is left as it was: its extension {text}")
                continue
            location = self._location(item)
            self._config._syrupy.queue_snapshot_write(
                extension=extension(), test_location=location, data=data, index=index
            )
