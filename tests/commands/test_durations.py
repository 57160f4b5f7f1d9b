"""``python -m pytest_accel durations``: the times of several jobs in one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.__main__ import main
from pytest_accel.schedule.durations_file import read, write


def test_the_times_of_jobs_are_added_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, one, two = (tmp_path / name for name in ("old.json", "old.1-of-2.json", "old.2-of-2.json"))
    write(one, {"a.py::test": {"cuda": [(2.0, 0.2)]}})
    write(two, {"b.py::test": {"none": [(3.0, 0.3)]}, "a.py::test": {"cuda": [(1.0, 0.1)]}})
    for _ in range(2):
        assert main(["durations", str(old), str(one), str(two)]) == 0
        assert capsys.readouterr().out == f"{old}: times of 2 tests\n"
        assert read(old) == {
            "a.py::test": {"cuda": [(1.0, 0.1), (2.0, 0.2)]},
            "b.py::test": {"none": [(3.0, 0.3)]},
        }


def test_wrong_files_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, absent, other = (tmp_path / name for name in ("old.json", "absent.json", "other.json"))
    write(old, {"a.py::test": {"cuda": [(1.0, 0.1)]}})
    before = old.read_bytes()
    other.write_text("[]")
    for wrong, why in ((absent, f"{absent}: no such file"), (other, f"{other} is no file of durations: ")):
        with pytest.raises(SystemExit) as caught:
            main(["durations", str(old), str(wrong)])
        assert caught.value.code == 2
        assert why in capsys.readouterr().err
    assert old.read_bytes() == before
