"""pytest-snapshot and syrupy: each rank compares with the stored snapshots and only collects changes.

The driver makes the changes on which all ranks agree.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins.rows import named

_KEPT = "(as it is stored)"


class Changes:
    """The changes that a test would make to snapshots on a rank, by the snapshots' names."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.compared: set[str] = set()
        """Names of the snapshots that the test has read: other ranks may only change other snapshots."""

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
        """Return the changes of a phase, even if there are none: the driver waits for all ranks."""
        sent = {"made": dict(self.made), "kept": sorted(self.compared - self.made.keys())}
        self.made.clear()
        self.compared.clear()
        return sent


def _agreed(item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the changes on which all ranks of `item` agree, with the names; fail `report` for others."""
    for name in sorted({name for one in sent.values() for name in one["made"]}):
        values = {
            rank: one["made"].get(name, _KEPT) for rank, one in sent.items() if name in (*one["made"], *one["kept"])
        }
        first, *others = values
        different = next((rank for rank in others if values[rank] != values[first]), None)
        if different is not None:
            lines = (_lines(values[first]), _lines(values[different]), f"rank {first}", f"rank {different}")
            text = "\n".join(difflib.unified_diff(*lines, lineterm="", n=2))
            _fail(report, f"the snapshot {name} differs between ranks; it is left as it was\n{text}")
        elif len(sent) < item.stash[MARKED].key.ranks:
            _fail(report, f"the snapshot {name} is left as it was: only {ranks_text(list(sent))} reported")
        else:
            yield name, values[first]


def _fail(report: pytest.TestReport, text: str) -> None:
    """Fail `report` with `text`. If it has failed already, add a section instead."""
    if report.failed:
        report.sections.append(("snapshots", text))
    else:
        report.outcome, report.longrepr = "failed", text


def _lines(value: Any) -> list[str]:
    """Return the lines of a snapshot that a rank would store. `value` is None if it would delete the snapshot."""
    data = value[-1] if isinstance(value, list) else value
    text = data.decode(errors="backslashreplace") if isinstance(data, bytes) else str(data)
    return [line if line.isprintable() else repr(line) for line in text.splitlines()]


def pytest_snapshot(config: pytest.Config) -> Changes | None:
    """Return the plugin that collects changes of files in this rank; None if files are not to be changed."""
    if not config.option.snapshot_update:
        return None
    snapshot = named("pytest_snapshot.plugin", "Snapshot")
    original = snapshot._snapshot_path
    changes = Changes()
    base: Any = type(Path())

    def change(path: Any, data: bytes | None = None) -> None:
        changes.made[os.path.abspath(path)] = data

    def read_bytes(path: Any) -> bytes:
        changes.compared.add(os.path.abspath(path))
        data: bytes = base.read_bytes(path)
        return data

    members = {"mkdir": lambda path, **options: None, "read_bytes": read_bytes, "unlink": change, "write_bytes": change}
    kind: Any = type("SnapshotPath", (base,), members)

    def _snapshot_path(self: Any, name: Any) -> Any:
        __tracebackhide__ = True
        return kind(original(self, name))

    snapshot._snapshot_path = _snapshot_path
    return changes


class Files:
    """Writes and deletes the files of pytest-snapshot in the driver."""

    def __init__(self, config: pytest.Config) -> None:
        """Need nothing of `config`."""

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        for name, data in _agreed(item, report, sent):
            path = Path(name)
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def syrupy(config: pytest.Config) -> Changes:
    """Return the plugin that collects changes of syrupy's snapshots in this rank."""
    # syrupy listens to reports, so a rank does not call its pytest_sessionstart, which makes its session.
    plugin: Any = config.pluginmanager.get_plugin("syrupy")
    plugin.pytest_sessionstart(SimpleNamespace(config=config))
    session: Any = vars(config)["_syrupy"]
    for needed in ("finish", "flush_snapshot_write_queue", "queue_snapshot_write"):
        getattr(session, needed)  # A release that writes by other methods is unknown.
    changes, recall = Changes(), session.recall_snapshot

    def name(extension: Any, test_location: Any, index: Any) -> str:
        where = {"test_location": test_location, "index": index}
        return f"{extension.get_snapshot_name(**where)!r} of {extension.get_location(**where)}"

    def recall_snapshot(extension: Any, test_location: Any, index: Any) -> Any:
        changes.compared.add(name(extension, test_location, index))
        return recall(extension, test_location, index)

    def queue_snapshot_write(extension: Any, test_location: Any, data: Any, index: Any) -> None:
        kind = type(extension)
        if "<locals>" in kind.__qualname__:  # The driver could not find it.
            pytest.fail(f"the extension {kind.__module__}.{kind.__qualname__} is not at the top level of a module")
        plain = str(data) if isinstance(data, str) else bytes(data)
        index = str(index) if isinstance(index, str) else int(index)
        changes.made[name(extension, test_location, index)] = [kind.__module__, kind.__qualname__, index, plain]

    session.recall_snapshot, session.queue_snapshot_write = recall_snapshot, queue_snapshot_write
    session.register_request = lambda assertion: None
    session.flush_snapshot_write_queue = session.finish = lambda: 0
    return changes


class Syrupy:
    """Writes syrupy's snapshots by the session of the driver.

    That session takes marked tests for skipped tests: it keeps their snapshots, and does not count them.
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

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        for name, (module, qualified_name, index, data) in _agreed(item, report, sent):
            extension: Any = sys.modules.get(module) or import_module(module)
            for part in qualified_name.split("."):
                extension = getattr(extension, part, None)
            if extension is None:
                text = f"{module}.{qualified_name} is not at the top level of a module"
                _fail(report, f"the snapshot {name} is left as it was: its extension {text}")
                continue
            location = named("syrupy.location", "PyTestLocation")(item)
            self._config._syrupy.queue_snapshot_write(
                extension=extension(), test_location=location, data=data, index=index
            )
