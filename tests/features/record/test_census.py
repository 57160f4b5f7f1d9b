"""Tests of ``python -m pytest_accel census``: what a record says of each test, and the comparison of several jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_accel import read_record
from pytest_accel.__main__ import main
from pytest_accel.features.record.census import JobTests, read_job
from tests.features.conftest import Suite
from tests.features.record.conftest import VERDICTS, Recorded, Written, ran, write_events


def _job(suite: Suite) -> JobTests:
    return read_job(str(suite.path / "record.jsonl"))


def _statuses(job: JobTests) -> dict[str, str]:
    """Return the status of each test by its name."""
    return {nodeid.partition("::")[2]: outcome.status for nodeid, outcome in job.tests.items()}


@pytest.mark.parametrize("name", ["no_xdist", "two_workers"])
def test_each_test_of_a_session_has_a_status(request: pytest.FixtureRequest, name: str) -> None:
    recorded: Recorded = request.getfixturevalue(name)
    job = read_job(str(recorded.folder / "record.jsonl"))
    not_run = dict.fromkeys(("test_never_runs", "test_never_gets_there"), "skipped")
    left_out = dict.fromkeys(("test_removed", "test_left_out"), "deselected")
    assert _statuses(job) == VERDICTS | not_run | left_out | {"test_too_many": "missing hardware"}
    assert job.complete
    reasons = {test.partition("::")[2]: outcome.reason for test, outcome in job.tests.items() if outcome.reason}
    assert reasons == {
        "test_too_many": "needs 9 sim devices; there are 4: 4 x sim",
        "test_never_runs": "[NOTRUN] would segfault",
        "test_never_gets_there": "expected failure in setup",
        "test_is_skipped": "not for want of hardware",
        "test_skips": "of its own accord",
    }


_TESTS_THAT_END_THE_SESSION = """
    import os
    import signal
    import time
    from pathlib import Path

    import pytest
    from tests.deadline import eventually

    HOW = os.environ.get("HOW")
    pytestmark = pytest.mark.xdist_group("one")

    @pytest.mark.parametrize("word", ["a@one"])
    def test_first(word): pass

    def test_ends():
        if HOW == "interrupt":
            # The controller must have got the report of the test before.
            eventually("the record of its end", lambda: '"when":"teardown"' in Path("record.jsonl").read_text())
            os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), signal.SIGINT)
            time.sleep(60)
        assert HOW != "fail"

    def test_last(): pass
    """


@pytest.mark.long(except_for="groups")
@pytest.mark.parametrize(
    ("how", "options", "statuses"),
    [
        pytest.param("interrupt", ("-n1",), ("not run", "not run"), id="interrupt"),
        pytest.param("fail", ("-n1", "--dist=loadgroup"), ("failed", "passed"), id="groups"),  # xdist changes the ids.
    ],
)  # fmt: skip
def test_a_test_without_verdict_has_not_run(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, how: str, options: tuple[str, ...], statuses: tuple[str, str]
) -> None:
    suite.write("test_it.py", _TESTS_THAT_END_THE_SESSION)
    monkeypatch.setenv("HOW", how)
    suite.run("--accel-record=record.jsonl", "-p", "no:randomly", *options)
    job = _job(suite)
    names = ("test_first[a@one]", "test_ends", "test_last")
    assert _statuses(job) == dict(zip(names, ("passed", *statuses), strict=True))
    assert job.complete


def test_a_session_whose_tests_are_partly_unknown_is_not_complete(suite: Suite) -> None:
    suite.write("test_it.py", "def test_passes():\n    pass\n\n\ndef test_fails():\n    assert False\n")
    suite.write("test_broken.py", "import not_there\n")
    suite.write("test_file.py", "import pytest\npytest.importorskip('not_there')\n")
    suite.run("--accel-record=record.jsonl", "--continue-on-collection-errors")
    names = {event.event for event in read_record(suite.path / "record.jsonl")}  # There are no marked tests.
    assert names == {"SessionStarted", "TestStarted", "PhaseReported", "TestsCollected", "SessionFinished"}
    tests, complete = _job(suite)
    assert {test: outcome.status for test, outcome in tests.items()} == {
        "test_it.py::test_passes": "passed",
        "test_it.py::test_fails": "failed",
        "test_file.py": "skipped",
    }
    assert tests["test_file.py"].reason == "could not import 'not_there': No module named 'not_there'"
    assert not complete
    # With --last-failed, pytest does not collect the tests that have passed.
    (suite.path / "test_broken.py").unlink()
    suite.run("--accel-record=record.jsonl", "--last-failed")
    assert _statuses(_job(suite)) == {"test_fails": "failed"}
    assert not _job(suite).complete


Compare = Callable[..., tuple[int, str]]
Tests = Mapping[str, tuple[str, str]]
"""The outcome of each test, which may be "missing", "deselected" or "not run", and its reason."""


def _write(name: str, tests: Tests, files: Mapping[str, str] = {}, *, complete: bool = True) -> None:
    """Write the record `name` of a session with these tests."""
    events: list[Written] = []
    for test, (outcome, why) in tests.items():
        more: dict[str, Any] = {"missing": why} if outcome == "missing" else {"skip": why} if why else {}
        if outcome not in ("deselected", "not run"):
            events += ran(test, "skipped" if outcome == "missing" else outcome, **more)
    left_out = [test for test, (outcome, _) in tests.items() if outcome == "deselected"]
    selected = [test for test in tests if test not in left_out]
    fields = {"tests": selected, "deselected": left_out, "complete": complete, "skipped_files": files}
    write_events(Path(name), *events, (9.0, "TestsCollected", fields))


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Provide a function that compares the records of jobs, and returns exit status and output."""
    monkeypatch.chdir(tmp_path)

    def run(*jobs: str, allow: str | None = None) -> tuple[int, str]:
        if allow is not None:
            Path("allow.txt").write_text(allow, encoding="utf-8")
        status = main(["census", *jobs, *(["--allow", "allow.txt"] if allow is not None else [])])
        return status, capsys.readouterr().out

    return run


_GROUPED = """4 of 6 tests ran in none of 3 jobs

deselected (two)
skipped: my\\nown (one)
    a.py::no

missing hardware: needs 8; there are 1 (one)
missing hardware: needs 8; there are 4 (two)
    a.py::eight

not run (two)
    a.py::late

skipped: no triton (two, three)
    b.py

not all tests were collected: two
"""


def test_tests_that_ran_in_no_job_are_grouped_by_cause(compare: Compare) -> None:
    one = {"a.py::ran": ("passed", ""), "a.py::eight": ("missing", "needs 8; there are 1")}
    _write("one", {**one, "a.py::no": ("skipped", "my\nown")})
    two = {"a.py::ran": ("deselected", ""), "a.py::eight": ("missing", "needs 8; there are 4")}
    files = {"b.py": "no triton", "a.py": "no triton", "pkg": "no triton"}
    _write("two", {**two, "a.py::no": ("deselected", ""), "a.py::late": ("not run", "")}, files, complete=False)
    _write("three", {"pkg/c.py::test": ("failed", "")}, {"b.py": "no triton"})
    assert compare("one", "two", "three") == (1, _GROUPED)
    _write("none", {})
    assert compare("none", "none") == (1, "no test was collected in 1 job\n")


_OUT_OF_DATE = """2 of 5 tests ran in the job

allow.txt is out of date:
    t.py::c: t.py::c ran in job
    t.py::gone: there is no such test in any job
    t.py::[cd]: there is no such test in any job
    t.py::?: t.py::c ran in job
    t.py::?: t.py::d ran in job
"""


def test_the_list_of_allowed_tests_must_be_right(compare: Compare) -> None:
    skipped = dict.fromkeys(("t.py::a[1]", "t.py::a[2]", "t.py::b[x#y]"), ("skipped", "own"))
    _write("job", {**skipped, "t.py::c": ("passed", ""), "t.py::d": ("passed", "")})
    allow = "# known\n\nt.py::a[?]  # needs 8 devices, which we do not have\n  t.py::b[x#y]\t# own\n"
    assert compare("job", allow=allow) == (0, "2 of 5 tests ran in the job; 3 did not, as allow.txt allows\n")
    assert compare("job", allow=f"{allow}t.py::c\nt.py::gone\nt.py::[cd]\nt.py::?\n") == (1, _OUT_OF_DATE)
    status, text = compare("job", allow="t.py::a[1]\n")
    assert (status, text.partition("\n")[0]) == (1, "2 of 5 tests did not run in the job")


def test_a_file_that_cannot_be_used_is_a_usage_error(compare: Compare, capsys: pytest.CaptureFixture[str]) -> None:
    _write("good", {"a": ("passed", "")})
    write_events(Path("killed"))
    Path("half").write_bytes(b"{")
    Path("other").write_bytes(b'{"document": "another"}\n')
    Path("binary").write_bytes(b"\xff")
    for arguments, text in (
        (["half"], "error: half has no events"),
        (["other"], "error: other is not a record"),
        (["killed"], "error: killed does not say what became of each test: its session was killed before it ended"),
        ([], "the following arguments are required: FILE"),
        (["none"], "error: none cannot be read: No such file"),
        (["good", "--allow", "binary"], "error: binary cannot be read: 'utf-8' codec"),
        (["good", "--allow", "none"], "error: none cannot be read: [Errno 2]"),
    ):
        with pytest.raises(SystemExit) as error:
            main(["census", *arguments])
        assert error.value.code == 2
        assert text in capsys.readouterr().err
