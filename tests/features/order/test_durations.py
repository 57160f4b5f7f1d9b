"""Tests of ``python -m pytest_accel durations``, which merges the times of several jobs into one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.__main__ import main
from pytest_accel.features.order.durations_file import read, write


def test_durations_of_jobs_are_merged_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, one, two = (tmp_path / name for name in ("old.json", "old.1-of-2.json", "old.2-of-2.json"))
    write(one, {"a.py::test": {"cuda": [(2.0, 0.2)]}})
    write(two, {"b.py::test": {"none": [(3.0, 0.3)]}, "a.py::test": {"cuda": [(1.0, 0.1)]}})
    for _ in range(2):
        assert main(["durations", str(target), str(one), str(two)]) == 0
        assert capsys.readouterr().out == f"{target}: times of 2 tests\n"
        assert read(target) == {
            "a.py::test": {"cuda": [(1.0, 0.1), (2.0, 0.2)]},
            "b.py::test": {"none": [(3.0, 0.3)]},
        }


def test_missing_and_invalid_files_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, absent, invalid = (tmp_path / name for name in ("old.json", "absent.json", "other.json"))
    write(target, {"a.py::test": {"cuda": [(1.0, 0.1)]}})
    before = target.read_bytes()
    invalid.write_text("[]")
    for path, reason in ((absent, f"{absent}: no such file"), (invalid, f"{invalid} is no file of durations: ")):
        with pytest.raises(SystemExit) as caught:
            main(["durations", str(target), str(path)])
        assert caught.value.code == 2
        assert reason in capsys.readouterr().err
    assert target.read_bytes() == before
