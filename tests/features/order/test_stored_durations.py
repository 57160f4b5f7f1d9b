"""Tests of the times of tests: pytest's cache, the file of ``--accel-durations``, and the command that merges files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.__main__ import main
from pytest_accel.features.order.stored_durations import (
    KEPT,
    Entries,
    add,
    merge,
    read,
)
from pytest_accel.features.order.tasks import tasks_of

_ENTRIES = st.dictionaries(
    st.sampled_from(("a.py::test_1", "b.py::test_é", "c.py::test_\udc80")),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 9)), min_size=1, max_size=KEPT, unique=True).map(sorted),
)


@given(_ENTRIES, _ENTRIES, _ENTRIES)
def test_merge_is_independent_of_order_and_repetition(one: Entries, other: Entries, third: Entries) -> None:
    assert merge([one, other]) == merge([other, one])
    assert merge([merge([one, other]), third]) == merge([one, merge([other, third])])
    assert merge([one, one]) == merge([one])
    assert all(len(pairs) <= KEPT for pairs in merge([one, other]).values())


@given(entries=_ENTRIES)
def test_a_written_file_is_read_back(tmp_path_factory: pytest.TempPathFactory, entries: Entries) -> None:
    path = tmp_path_factory.mktemp("times") / "new" / "durations.json"
    assert add(path, [entries]) == read(path) == merge([entries])
    assert os.listdir(path.parent) == ["durations.json"]


def test_a_session_adds_its_times(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    add(path, [{"b.py::test_2": [(1.0, 2.0)]}, {"a.py::test_1": [(1.0, 0.1)]}])
    add(path, [{"a.py::test_1": [(2.0, 0.3)]}, {"a.py::test_1": [(2.0, 0.2)]}])  # Two with one id.
    times = {test: [took for _, took in pairs] for test, pairs in read(path).items()}
    assert times == {"a.py::test_1": [0.1, 0.2, 0.3], "b.py::test_2": [2.0]}
    # One line for each test, sorted by id, so that a diff of two files is readable.
    lines = [line for line in path.read_text().splitlines() if "::" in line]
    assert [line.split('"')[1] for line in lines] == ["a.py::test_1", "b.py::test_2"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "Expected `object`, got `array`"),
        ('{"format": "pytest-accel durations", "version": 2, "tests": {}}', "Invalid enum value 2 - at `$.version`"),
        (json.dumps({"t": [[0.0, "soon"]]}), "Expected `float`, got `str`"),
        (json.dumps({"t": [[0.0]]}), "Expected `array` of length 2"),
        (json.dumps({"t": [[0.0, float("nan")]]}), "Expected `float` >= 0.0"),
        ('{"t": [[0.0, 1e999]]}', "Expected `float` <= "),
        (f'{{"t": [[0.0, {10**400}]]}}', ""),
        ("[" * 100_000, ""),
    ],
)
def test_an_invalid_file_is_refused_with_its_name_and_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "durations.json"
    if text.startswith('{"t"'):
        text = f'{{"format": "pytest-accel durations", "version": 1, "tests": {text}}}'
    path.write_text(text)
    with pytest.raises(pytest.UsageError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} cannot be read as a file of durations: {reason}")


def test_the_command_merges_files_once_and_refuses_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, one, two, absent = (tmp_path / name for name in ("old.json", "one.json", "two.json", "absent.json"))
    add(one, [{"a.py::test": [(2.0, 0.2)]}])
    add(two, [{"b.py::test": [(3.0, 0.3)], "a.py::test": [(1.0, 0.1)]}])
    merged = {"a.py::test": [(1.0, 0.1), (2.0, 0.2)], "b.py::test": [(3.0, 0.3)]}
    for _ in range(2):
        assert main(["durations", str(target), str(one), str(two)]) == 0
        assert capsys.readouterr().out == f"{target}: times of 2 tests\n"
        assert read(target) == merged
    two.write_text("[]")
    for path, reason in ((absent, f"{absent}: no such file"), (two, f"{two} cannot be read as a file of durations: ")):
        with pytest.raises(SystemExit):
            main(["durations", str(target), str(path)])
        assert reason in capsys.readouterr().err
    assert read(target) == merged


def test_the_expected_time_is_the_median() -> None:
    stored: Entries = {"a": list(enumerate([9.0, 1.0, 2.0])), "b": [(0.0, 4.0), (1.0, 5.0)], "c": []}
    tasks = tasks_of(["a", "b", "c", "d"], [()] * 4, stored)
    assert [task.seconds for task in tasks] == [2.0, 4.5, None, None]
