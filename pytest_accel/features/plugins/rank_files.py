"""Files of the suite that a plugin would write in each rank: the driver writes them once, if all ranks agree.

In a rank, a bridge passes the plugin's changes to a `RankFiles`. In the driver it registers a `WrittenFiles`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.shims import base_temporary_directory
from pytest_accel.features.plugins.by_rank import difference, fail, number_of_ranks


class RankFiles:
    """Collects the changes that the running test would make to files of the suite. A pytest plugin in the rank."""

    def __init__(self, config: pytest.Config) -> None:
        temporary = base_temporary_directory(config)
        assert temporary is not None  # Ranks are started with --basetemp.
        self.temporary = temporary
        """The temporary folder of this rank."""
        self._written: dict[str, bytes | None] = {}
        """The changes of the running test by absolute path; None: the file is deleted."""
        self._unsent: dict[str, bytes | None] = {}
        """The changes of this phase, in the same form."""
        self._kept: set[str] = set()
        """Absolute paths of files whose content was correct in this phase."""

    def write(self, path: Path, data: bytes) -> None:
        """Have the driver write `data` to the file `path`."""
        self._change(path, data)

    def delete(self, path: Path) -> None:
        """Have the driver delete the file `path`."""
        self._change(path, None)

    def keep(self, path: Path) -> None:
        """Record that the file `path` is correct for this rank: no other rank may change it."""
        self._kept.add(os.path.abspath(path))

    def is_changed(self, path: Path) -> bool:
        """Return whether the running test has changed the file `path`."""
        return os.path.abspath(path) in self._written

    def changed(self, path: Path) -> bytes | None:
        """Return what the running test has written to the file `path`; None: it has deleted it."""
        return self._written[os.path.abspath(path)]

    @contextmanager
    def staged(self, folder: Path) -> Iterator[Path]:
        """Give an empty folder. At the end, have the driver write the files in it to `folder`."""
        with TemporaryDirectory(dir=self.temporary) as name:
            stage = Path(name)
            yield stage
            for path in sorted(stage.rglob("*")):
                if path.is_file():
                    self.write(folder / path.relative_to(stage), path.read_bytes())

    def _change(self, path: Path, data: bytes | None) -> None:
        name = os.path.abspath(path)
        self._written[name] = self._unsent[name] = data

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._written.clear()  # In a rerun the files are in the state in which the driver has left them.
        self._unsent.clear()
        self._kept.clear()

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
        """Return the changes of this phase, even if there are none: the driver waits for data of all ranks."""
        sent = {"files": dict(self._unsent), "kept": sorted(self._kept - self._unsent.keys())}
        self._unsent.clear()
        self._kept.clear()
        return sent


class WrittenFiles:
    """Makes the changes to files of the suite on which all ranks of a test agree. A pytest plugin in the driver."""

    def __init__(self, title: str, config: pytest.Config) -> None:
        """`title` is the title of failures in the report of a test that has failed otherwise."""
        self._title = title
        self._config = config

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> list[str]:
        """Make the changes of a phase on which ranks agree; return the names of the changed files."""
        complete, done = len(sent) == number_of_ranks(item), []
        for name in sorted({name for one in sent.values() for name in one["files"]}):
            values = {rank: one["files"][name] for rank, one in sent.items() if name in one["files"]}
            values |= {rank: _content(name) for rank, one in sent.items() if name in one["kept"]}
            shown = shown_path(self._config, name)
            text = difference(values)
            if text is not None:
                fail(report, self._title, f"{shown} differs between ranks; it is left as it was\n{text}")
            elif not complete:
                fail(report, self._title, f"{shown} is left as it was: only {ranks_text(list(sent))} reported")
            else:
                put(Path(name), next(iter(values.values())))
                done.append(name)
        return done


def shown_path(config: pytest.Config, name: str) -> str:
    """Return the path `name` as reports show it: relative to the invocation folder, if it is below it."""
    here = config.invocation_params.dir
    return os.path.relpath(name, here) if Path(name).is_relative_to(here) else name


def _content(name: str) -> bytes | None:
    try:
        return Path(name).read_bytes()
    except FileNotFoundError:
        return None


def put(path: Path, data: bytes | None) -> None:
    """Write `data` to the file `path`, and create its folders; delete the file if `data` is None."""
    if data is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
