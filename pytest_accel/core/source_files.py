"""The states of a suite's files when a process has read them, and their nodes, to compare with another process."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pytest

_LONGEST_TEXT = 1 << 20
"""Number of characters of a test file that are searched for marks: those of a file of gigabytes would take seconds."""


class SourceState(NamedTuple):
    """The state of a file of the suite."""

    path: str
    size: int
    modified: int
    """Time of the last modification, in nanoseconds since the epoch."""
    digest: bytes = b""
    """Digest of the text; empty if it is not known."""


_conftests: WeakKeyDictionary[ModuleType, SourceState] = WeakKeyDictionary()
"""The state of each conftest that this process has imported."""
_FILE: pytest.StashKey[SourceState] = pytest.StashKey()
"""The state of a test file before it was imported, on its machine."""
_SOURCES: pytest.StashKey[tuple[SourceState, ...]] = pytest.StashKey()
"""The states of a test file and of its conftests, on the machine of the file."""


class Children:
    """The children of one collector as they were collected, before any plugin renames, reorders or selects them."""

    def __init__(self, nodes: Sequence[pytest.Item | pytest.Collector]) -> None:
        self.names = [node.name for node in nodes]
        self.families = [getattr(node, "originalname", None) or node.name for node in nodes]
        self.places: Any = None
        """The `NodePlace` of each child, made when the first is asked for: most files have no test for ranks."""


PLACE: pytest.StashKey[tuple[Children, int]] = pytest.StashKey()
"""The children among which a collector has returned the node, and its index there. Copies of the node have it, too."""


class PlaceRecorder:
    """Pytest plugin that records the places of all nodes. Registered in every process that collects."""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Record the places before other wrappers, as that of ``--lf``, leave out some of the children."""
        report = yield
        if not isinstance(collector, pytest.Session | pytest.Directory):
            nodes = report.result or ()
            children = Children(nodes)
            for index, node in enumerate(nodes):
                node.stash[PLACE] = children, index
        return report


def text_of(path: Path) -> str:
    """Return the start of the text of a test file, or "" if it cannot be read: the collection reports the error.

    A path that is no regular file is not opened: to open a named pipe may block, and a device may have no end.
    """
    try:
        if not path.is_file():
            return ""
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST_TEXT)
    except OSError:
        return ""


def record_conftest(plugin: object, name: str) -> None:
    """Record the state of the conftest `plugin`, which is registered under `name`; no-op for another plugin."""
    if name.endswith("conftest.py") and isinstance(plugin, ModuleType) and (state := _look_at(name)) is not None:
        _conftests[plugin] = state


def record_file(file: pytest.File) -> None:
    """Record the state of a test file. Call this before it is imported."""
    if (state := _look_at(str(file.path))) is not None:
        file.stash[_FILE] = state


def sources_of(item: pytest.Item) -> tuple[SourceState, ...]:
    """Return the states of the file of `item`, and of the conftests that apply to it, as this process has read them.

    Call this soon after the collection: of a file that has changed since, the digest is not known.
    """
    file = next((node for node in item.listchain() if isinstance(node, pytest.File)), None)
    if file is None:
        return ()
    if _SOURCES not in file.stash:
        names = [str(folder / "conftest.py") for folder in file.path.parents]
        conftests = [_imported(name, file.config) for name in names if file.config.pluginmanager.has_plugin(name)]
        states = (file.stash.get(_FILE, None), *conftests)
        file.stash[_SOURCES] = tuple(state._replace(digest=_digest(state)) for state in states if state is not None)
    return file.stash[_SOURCES]


def changed(sources: Sequence[SourceState], config: pytest.Config) -> Path | None:
    """Return the first file of `sources` that this process has read, or would read, with another text; None if none."""
    for then in sources:
        was_imported = config.pluginmanager.has_plugin(then.path)
        now = _imported(then.path, config) if was_imported else _look_at(then.path)
        if now is None or (now.size, now.modified) == (then.size, then.modified):
            continue
        # Another process may write a file again with the same text, and then the digest may be unknown.
        if now.size != then.size or (then.digest and _digest(now) not in (b"", then.digest)):
            return Path(then.path)
    return None


def _imported(path: str, config: pytest.Config) -> SourceState | None:
    """Return the state of the conftest `path` when this process has imported it; None if it is not known."""
    plugin = config.pluginmanager.get_plugin(path)
    return _conftests.get(plugin) if isinstance(plugin, ModuleType) else None


def _look_at(path: str) -> SourceState | None:
    """Return the present state of the file `path`, without its digest; None if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return SourceState(path, found.st_size, found.st_mtime_ns)


def _digest(state: SourceState) -> bytes:
    """Return the digest of the text of a file; empty if it is not in the `state` any more, or cannot be read."""
    try:
        text = Path(state.path).read_bytes()
    except OSError:
        return b""
    return blake2b(text, digest_size=16).digest() if _look_at(state.path) == state else b""
