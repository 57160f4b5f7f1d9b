"""The page of ``--accel-report`` for 5,000 tests on 64 devices: its size, and the time to make it."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.large_record import write_record
from benchmarks.measure import Effort, Figure
from pytest_accel import read_record
from pytest_accel.features.record.timeline import sessions_of

_TESTS = 5_000
_DEVICES = 64
_SIZE = 8.0  # MB


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the time to make the page, and its size."""
    from pytest_accel.features.record.session_summary import page

    folder.mkdir()
    write_record(folder / "record.jsonl", _TESTS, _DEVICES)
    sessions = sessions_of([read_record(folder / "record.jsonl")])
    began = time.perf_counter()
    text = page(sessions)
    made = time.perf_counter() - began
    file = folder / "report.html"
    file.write_text(text, encoding="utf-8")
    name = f"page of {_TESTS:,} tests"
    return [
        Figure(f"{name}: making", made, "s"),
        Figure(f"{name}: size", file.stat().st_size / 1e6, "MB", _SIZE, f"{_SIZE:g} MB"),
    ]
