"""Tests of ``python -m pytest_accel census``, which compares the records of a pipeline's jobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.__main__ import main
from pytest_accel.core.record_events import (
    SCHEMA,
    DevicesThere,
    MissingNeed,
    Outcome,
    SessionFinished,
    SessionStarted,
    Status,
    TestsCounted,
)
from pytest_accel.features.record import census_merge
from pytest_accel.features.record.census_hooks import DESELECTED, NOT_RUN
from pytest_accel.features.record.census_merge import merge, parse_allow
from pytest_accel.features.record.record_file import RecordFile, read_record

PASSED = Outcome(Status.PASSED)
ROOT = Path(__file__).resolve().parents[3]


def missing(there: int, devices: int = 8, kind: str | None = "cuda", **need: Any) -> Outcome:
    """Return the outcome of a test that needs `devices`, in a session with `there` devices of the kind cuda.

    `kind` is the kind that the test's marks name; None: they name none.
    """
    reason = f"needs {devices}; there are {there}"
    has = DevicesThere("cuda" if there else "none", there)
    return Outcome(Status.MISSING, reason, need_of(devices=devices, kind=kind or has.kind, **need), has)


def need_of(**need: Any) -> MissingNeed:
    """Return the needs of a test: one process and no device, except for what `need` says."""
    alone = {"devices": 0, "world_size": 1, "nodes": 1, "ranks_per_node": 1, "memory": 0, "share": 1.0}
    return MissingNeed(**{"kind": "none", "backend": (), **alone, **need})


def skipped(reason: str) -> Outcome:
    return Outcome(Status.SKIPPED, reason)


def census(
    tests: Mapping[str, Outcome], *, complete: bool = True, collect_only: bool = False, files: Mapping[str, str] = {}
) -> TestsCounted:
    return TestsCounted({}, complete, collect_only, tests, files)


def write(path: Path, *counted: TestsCounted) -> None:
    """Write the record of a session whose tests `counted` describes; without it, that of a session that was killed."""
    file = RecordFile(str(path))
    file(SessionStarted(SCHEMA, "1", "1", (), "/"))
    for one in counted:
        file(one)
        file(SessionFinished(0))
    file.close()


Compare = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Provide a function that writes jobs to files, compares them, and returns exit status and lines of output."""
    monkeypatch.chdir(tmp_path)

    def run(*, allow: str | None = None, **jobs: TestsCounted) -> tuple[int, list[str]]:
        for name, job in jobs.items():
            write(Path(f"{name}.json"), job)
        arguments = ["census", *(f"{name}.json" for name in jobs)]
        if allow is not None:
            Path("allow.txt").write_text(allow, encoding="utf-8")
            arguments += ["--allow", "allow.txt"]
        status = main(arguments)
        return status, capsys.readouterr().out.splitlines()

    return run


def test_the_status_is_0_if_each_test_ran_in_one_job(compare: Compare) -> None:
    for status in (Status.PASSED, Status.FAILED, Status.ERROR, Status.XFAILED, Status.XPASSED):
        assert compare(
            one=census({"test_x.py::test_it": missing(0), "test_x.py::test_other": PASSED}),
            two=census({"test_x.py::test_it": Outcome(status), "test_x.py::test_other": DESELECTED}),
        ) == (0, ["2 of 2 tests ran in one of 2 jobs"])


def test_tests_that_ran_in_no_job_are_grouped_by_reason(compare: Compare) -> None:
    memory = missing(1, 2, memory=80 * 1024**3, world_size=4)
    status, lines = compare(
        none=census({"a::eight": missing(0), "a::eight_too": missing(0), "a::any": missing(0, kind=None)}),
        one=census(
            {"a::eight": missing(1), "a::eight_too": missing(1), "a::mine": skipped("my\nreason"), "a::ran": PASSED}
        ),
        four=census({"a::eight": missing(4), "a::eight_too": missing(4), "a::any": missing(4, kind=None)}),
        some=census({"a::big": memory, "a::pair": DESELECTED, "a::mine": skipped("other")}),
        many=census({"a::pair": missing(1, 2)}),
        ended=census({"a::late": NOT_RUN, "a::ran": NOT_RUN}, complete=False),
        all=census({"a::late": NOT_RUN, "a::nobody": NOT_RUN, "a::ran": NOT_RUN}, complete=False, collect_only=True),
    )
    assert status == 1
    assert lines == [
        "8 of 9 tests ran in none of 6 jobs",
        "",
        "collected only: all.json",
        "    a::nobody",
        "",
        "needs 2 cuda devices with >= 80 GiB for 4 ranks; the job had 1",
        "    a::big",
        "",
        "needs 2 cuda devices; the job had 1",
        "deselected: some.json",
        "    a::pair",
        "",
        "needs 8 cuda devices; the jobs had 0, 1, 4",
        "    a::eight",
        "    a::eight_too",
        "",
        "needs 8 cuda devices; the jobs had 0, 4",
        "    a::any",
        "",
        "not run before the session ended: ended.json",
        "    a::late",
        "",
        r"skipped: my\nreason",
        "skipped: other",
        "    a::mine",
        "",
        "not complete, so that tests may be unknown or not run: ended.json",
    ]


def test_reasons_other_than_the_number_of_devices_are_listed_in_full(compare: Compare) -> None:
    need = need_of(devices=1, kind="cuda", memory=80 * 1024**3)
    small = Outcome(Status.MISSING, "needs 1 with 80 GiB; there are 4", need, DevicesThere("cuda", 4))
    ranks = Outcome(Status.MISSING, "needs 4 ranks; torchrun has started 2", need_of(world_size=4))
    share = missing(1, 2, share=0.5)
    differs = {"one": missing(0, 2), "two": missing(1, 3)}
    _, lines = compare(
        one=census({"a::small": small, "a::ranks": ranks, "a::part": share, "a::differs": differs["one"]}),
        two=census({"a::differs": differs["two"]}),
    )
    assert lines[2:] == [
        "needs 1 with 80 GiB; there are 4",
        "    a::small",
        "",
        "needs 2; there are 0",
        "needs 3; there are 1",
        "    a::differs",
        "",
        "needs 2; there are 1",
        "    a::part",
        "",
        "needs 4 ranks; torchrun has started 2",
        "    a::ranks",
    ]


def test_a_pipeline_without_tests_is_an_error(compare: Compare) -> None:
    assert compare(one=census({}), two=census({})) == (1, ["no test was collected in 2 jobs"])


def test_an_incomplete_job_is_named(compare: Compare) -> None:
    status, lines = compare(one=census({"a::b": PASSED}, complete=False))
    assert (status, lines) == (0, ["1 of 1 test ran in the job; not complete: one.json"])


def test_a_file_that_all_jobs_skip_is_listed_without_its_tests(compare: Compare) -> None:
    files = {"tests/test_a.py": "no triton", "tests/test_b.py": "no triton", "pkg": "no package"}
    one = census({"tests/test_c.py::test": PASSED}, files=files)
    status, lines = compare(one=one, two=census({"tests/test_b.py::TestIt::test": PASSED, "pkg/test_d.py::t": PASSED}))
    assert (status, lines) == (
        1,
        ["1 of 4 tests ran in none of 2 jobs", "", "skipped: no triton", "    tests/test_a.py"],
    )


def test_tests_that_match_a_line_of_allow_need_not_run(compare: Compare) -> None:
    one = census(
        {
            "t.py::test_a[1]": missing(0),
            "t.py::test_a[2]": missing(0),
            "t.py::test_b[x#y]": skipped("own"),
            "t.py::test_c": PASSED,
        }
    )
    allow = "# known\n\nt.py::test_a[?]  # needs 8 devices, which we do not have\n  t.py::test_b[x#y]\t# own\n"
    assert compare(one=one, allow=allow) == (0, ["1 of 4 tests ran in the job; 3 did not, as allow.txt allows"])
    status, lines = compare(one=one, allow="t.py::test_a[1]\n")
    assert status == 1
    assert [line.strip() for line in lines if line.startswith("    ")] == ["t.py::test_a[2]", "t.py::test_b[x#y]"]


def test_lines_of_allow_whose_tests_ran_or_do_not_exist_are_errors(compare: Compare) -> None:
    tests = {"t.py::test_a": skipped("own"), "t.py::test_b": PASSED, "t.py::test_c": PASSED}
    assert compare(one=census(tests), allow="t.py::test_a\nt.py::test_b\nt.py::gone\nt.py::*_[ac]\nt.py::*_?\n") == (
        1,
        [
            "",
            "allow.txt is out of date:",
            "    line 2: t.py::test_b: ran in one.json",
            "    line 3: t.py::gone: there is no such test in any job",
            "    line 4: t.py::*_[ac]: there is no such test in any job",
            "    line 5: t.py::*_?: t.py::test_b ran in one.json",
            "    line 5: t.py::*_?: t.py::test_c ran in one.json",
        ],
    )


@pytest.mark.parametrize(
    "content", [b"{", b"", b'{"document": "pytest-accel census"}\n'], ids=["half", "empty", "other"]
)
def test_an_invalid_file_is_named(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    valid, invalid = tmp_path / "good.json", tmp_path / "bad.json"
    write(valid, census({"a::b": PASSED}))
    invalid.write_bytes(content)
    with pytest.raises(SystemExit) as error:
        main(["census", str(valid), str(invalid)])
    assert error.value.code == 2
    assert f"error: {invalid}" in capsys.readouterr().err


def test_the_record_of_a_session_that_was_killed_is_no_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "killed.jsonl")
    with pytest.raises(SystemExit) as error:
        main(["census", str(tmp_path / "killed.jsonl")])
    assert error.value.code == 2
    assert "killed.jsonl does not say what became of each test: its session was killed" in capsys.readouterr().err


def test_a_test_without_hardware_must_have_a_need(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a test with the status 'missing hardware' must have a need"):
        Outcome(Status.MISSING)


def test_control_and_unencodable_characters_of_ids_are_escaped(tmp_path: Path) -> None:
    write(tmp_path / "a.json", census({"é\x1b[2J\udcff::b": skipped("own")}))
    command = [sys.executable, "-m", "pytest_accel", "census", "a.json"]
    environ = {"PATH": "", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "1 of 1 test did not run in the job\n\nskipped: own\n    \\xe9\\x1b[2J\\udcff::b\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "the following arguments are required: FILE"),
        (("gone.json",), "error: gone.json cannot be read: No such file or directory"),
        ((".",), "error: . cannot be read: Is a directory"),
        (("a.json", "--allow", "allow.txt"), "error: allow.txt: must be UTF-8: "),
        (("a.json", "--allow", "gone.txt"), "error: gone.txt: cannot be read: No such file or directory"),
    ],
)
def test_invalid_arguments_and_unreadable_files_are_usage_errors(
    arguments: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a.json"), census({"a::b": PASSED}))
    Path("allow.txt").write_bytes(b"\xff")
    with pytest.raises(SystemExit) as error:
        main(["census", *arguments])
    assert error.value.code == 2
    assert text in capsys.readouterr().err


def test_census_must_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--json", "census"])
    assert error.value.code == 2
    assert "census must be the first argument" in capsys.readouterr().err


# Surrogates are included: file names that are not UTF-8 contain them.
IDS = st.text(st.characters(), min_size=1, max_size=8)
NEEDS = st.builds(
    need_of,
    devices=st.integers(0, 9),
    kind=st.sampled_from(["none", "cuda", "sim"]),
    memory=st.integers(0, 2**40),
    share=st.sampled_from([0.25, 1.0]),
    world_size=st.integers(1, 9),
    nodes=st.integers(1, 3),
    backend=st.sampled_from([(), ("gloo",), ("nccl", "gloo")]),
)
THERE = st.builds(DevicesThere, st.sampled_from(["none", "cuda", "sim"]), st.integers(0, 9))
OUTCOMES = st.builds(Outcome, st.sampled_from(sorted(set(Status) - {Status.MISSING}, key=str)), st.none() | IDS) | (
    st.builds(Outcome, st.just(Status.MISSING), IDS, NEEDS, st.none() | THERE)
)
COUNTED = st.builds(
    TestsCounted,
    selection=st.just({"-k": "a"}),
    complete=st.booleans(),
    collect_only=st.booleans(),
    tests=st.dictionaries(IDS, OUTCOMES, max_size=5),
    skipped_files=st.dictionaries(IDS, IDS, max_size=2),
)


@given(found=COUNTED)
def test_what_was_recorded_is_read_back(found: TestsCounted, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip.json"
    write(path, found)
    _, read, _ = (one.event for one in read_record(path))
    assert isinstance(read, TestsCounted)
    assert len(read.tests) == len(found.tests)
    assert [one.status for one in read.tests.values()] == [one.status for one in found.tests.values()]


@given(jobs=st.lists(COUNTED, min_size=1, max_size=4))
def test_exactly_the_tests_that_ran_in_no_job_are_listed(jobs: list[TestsCounted]) -> None:
    merged = merge({f"{number}.json": job for number, job in enumerate(jobs)})
    ran = {nodeid for job in jobs for nodeid, outcome in job.tests.items() if outcome.status in census_merge.RAN}
    known = {nodeid for job in jobs for nodeid in job.tests}
    assert merged.not_run.keys() & known == known - ran
    assert not merged.not_run.keys() & ran
    assert merged.is_proof == (bool(known) and not merged.not_run)
    text = census_merge.text(merged, None)
    assert text.count("\n    ") == len(merged.not_run)
    # The merge is a proof if exactly these tests are allowed, and is none if one of them is not.
    if all(nodeid.isalnum() for nodeid in merged.not_run) and merged.tests:
        allow = parse_allow("\n".join(merged.not_run))
        assert merge(merged.jobs, allow).is_proof
        assert merge(merged.jobs, allow[1:]).is_proof == (len(allow) == 0)
