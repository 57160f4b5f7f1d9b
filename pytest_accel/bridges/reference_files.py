"""Reference files that a plugin generates from what tests return: the driver writes them, from what rank 0 has made.

Each rank generates into a folder of its own, so that no two processes write one file, and ranks can be compared.
"""

from __future__ import annotations

import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.accounts import ranks_text

_EXACT = (".png", ".txt")
"""Suffixes of files whose bytes are alike if their content is: others may hold the time at which they were made."""


class Sender:
    """Sends what a rank has generated for a test: rank 0 the files, the others their hashes."""

    def __init__(self, rank: int, key: str) -> None:
        self._rank = rank
        self._key = key
        self._folder = tempfile.TemporaryDirectory(prefix="accel-references-")
        self.folder = Path(self._folder.name)
        """Where this rank is to generate files."""

    @pytest.hookimpl
    def pytest_accel_rank_data(self, report: pytest.TestReport) -> dict[str, Any] | None:
        if report.when != "call":
            return None
        found: dict[str, bytes | str] = {}
        for path in [path for path in self.folder.rglob("*") if path.is_file()]:
            data = path.read_bytes()
            found[path.relative_to(self.folder).as_posix()] = data if self._rank == 0 else _digest(path.name, data)
            path.unlink()
        return {self._key: found} if found else None

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        self._folder.cleanup()


class Writer:
    """Writes what rank 0 has generated, if all ranks have generated the same."""

    def __init__(self, folder: str | Path, key: str) -> None:
        self._folder = Path(folder).absolute()
        self._key = key

    @pytest.hookimpl
    def pytest_accel_merge(self, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]) -> None:
        sent = {rank: data[self._key] for rank, data in rank_data.items() if self._key in data}
        files = sent.get(0, {})
        if report.failed or not sent:
            return
        wanted = {name: _digest(name, data) for name, data in files.items()}
        different = [rank for rank, found in sent.items() if rank and found != wanted]
        if different:
            fail_for_difference(report, different, sorted({name for found in sent.values() for name in found}))
            return
        for name, data in files.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def fail_for_difference(report: pytest.TestReport, ranks: list[int], names: list[str]) -> None:
    """Fail a test whose `ranks` have generated something else than rank 0."""
    what = ", ".join(names)
    report.outcome = "failed"
    report.longrepr = f"{ranks_text(ranks)} generated another {what} than rank 0: nothing has been written"


def _digest(name: str, data: bytes) -> str:
    return sha256(data).hexdigest() if name.endswith(_EXACT) else ""
