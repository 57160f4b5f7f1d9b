"""Tests of ``python -m pytest_accel census``: what a record says of each test, and the comparison of several jobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_accel.__main__ import main
from pytest_accel.features.record.census import JobTests, read_job
from pytest_accel.features.record.record_file import RecordFile

if TYPE_CHECKING:
    from tests.features.conftest import Suite

ROOT = Path(__file__).resolve().parents[3]
_TESTS = """
    import os

    import pytest


    @pytest.fixture
    def broken():
        raise RuntimeError


    @pytest.mark.parametrize("number", range(2))
    def test_passes(number):
        pass


    @pytest.mark.distributed(2)
    def test_fails(rank):
        assert rank == 0


    def test_errs(broken):
        pass


    @pytest.mark.xfail
    def test_xfails():
        assert False


    @pytest.mark.xfail
    def test_xpasses():
        pass


    @pytest.mark.xfail(run=False, reason="would segfault")
    def test_never_runs():
        pass


    @pytest.mark.xfail
    def test_never_gets_there(broken):
        pass


    @pytest.mark.distributed(2)
    def test_skips():
        pytest.skip("of its own accord")


    @pytest.mark.devices(9)
    @pytest.mark.skip(reason="not for want of hardware")
    def test_is_skipped():
        pass


    @pytest.mark.devices(9)
    def test_nine():
        pass


    @pytest.mark.xfail
    @pytest.mark.distributed([16, 32])
    def test_ranks():
        assert False


    @pytest.mark.xdist_group("one")
    @pytest.mark.parametrize("word", ["a@one", "é"])
    def test_words(word):
        pass


    def test_removed():
        pass


    def test_left_out():
        pass
    """
_CONFTEST = """
    def pytest_collection_modifyitems(items):
        # Reported to nobody, as some plugins do it.
        items[:] = [item for item in items if item.name != "test_removed"]
    """
_STATUSES = {
    **dict.fromkeys(("test_passes[0]", "test_passes[1]", "test_words[a@one]", "test_words[\\xe9]"), "passed"),
    "test_fails": "failed",
    "test_errs": "error",
    "test_xfails": "xfailed",
    "test_xpasses": "xpassed",
    **dict.fromkeys(("test_never_runs", "test_never_gets_there", "test_skips", "test_is_skipped"), "skipped"),
    **dict.fromkeys(("test_nine", "test_ranks[world_size=16]", "test_ranks[world_size=32]"), "missing hardware"),
    **dict.fromkeys(("test_removed", "test_left_out"), "deselected"),
}


def _job(suite: Suite, file: str = "record.jsonl") -> JobTests:
    return read_job(str(suite.path / file))


def _statuses(job: JobTests) -> dict[str, str]:
    """Return the status of each test by its name."""
    return {nodeid.partition("::")[2]: outcome.status for nodeid, outcome in job.tests.items()}


@pytest.mark.parametrize(
    "options",
    [
        ("-n1", "--dist=loadgroup"),  # xdist appends the group to the ids of tests.
        pytest.param(("-n2",), marks=pytest.mark.long),
        pytest.param(("-n2", "--dist=worksteal", "-o", "accel_schedule=off"), marks=pytest.mark.long),
        pytest.param(("--accel-strict", "-o", "accel_schedule=always"), marks=pytest.mark.long),
        pytest.param(("--accel-shard=1/1", "--accel-select=devices < 10"), marks=pytest.mark.long),
        pytest.param(("test_it.py", "test_file.py", "test_it.py", "--keep-duplicates"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_the_statuses_of_tests_do_not_depend_on_the_options(
    suite: Suite, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite.write("test_it.py", _TESTS)
    suite.write("test_file.py", "import pytest\npytest.importorskip('not_there')\ndef test_in_file(): pass\n")
    suite.write("conftest.py", _CONFTEST)
    suite.run("-k", "not left_out", "--accel-record=record.jsonl", *options)
    job = _job(suite)
    expected = _STATUSES
    if "--accel-select=devices < 10" in options:
        expected = {name: "deselected" if "world_size" in name else status for name, status in _STATUSES.items()}
    assert _statuses(job) == expected
    assert job.complete
    assert job.tests["test_it.py::test_nine"].reason == "needs 9 sim devices; there are 4: 4 x sim"
    if options[0] == "-n1":
        monkeypatch.chdir(suite.path)
        capsys.readouterr()  # Discards the output of the sessions.
        assert main(["census", "record.jsonl"]) == 1
        assert capsys.readouterr().out.splitlines() == [
            "10 of 18 tests did not run in the job",
            "",
            "deselected (record.jsonl)",
            "    test_it.py::test_left_out",
            "    test_it.py::test_removed",
            "",
            "missing hardware: needs 16 sim devices; there are 4: 4 x sim (record.jsonl)",
            "    test_it.py::test_ranks[world_size=16]",
            "",
            "missing hardware: needs 32 sim devices; there are 4: 4 x sim (record.jsonl)",
            "    test_it.py::test_ranks[world_size=32]",
            "",
            "missing hardware: needs 9 sim devices; there are 4: 4 x sim (record.jsonl)",
            "    test_it.py::test_nine",
            "",
            "skipped: [NOTRUN] would segfault (record.jsonl)",
            "    test_it.py::test_never_runs",
            "",
            "skipped: could not import 'not_there': No module named 'not_there' (record.jsonl)",
            "    test_file.py",
            "",
            "skipped: expected failure in setup (record.jsonl)",
            "    test_it.py::test_never_gets_there",
            "",
            "skipped: not for want of hardware (record.jsonl)",
            "    test_it.py::test_is_skipped",
            "",
            "skipped: of its own accord (record.jsonl)",
            "    test_it.py::test_skips",
        ]


_TESTS_THAT_END_THE_SESSION = """
    import os
    import signal
    import time

    import pytest

    HOW = os.environ.get("HOW")


    def test_first():
        pass


    def test_ends():
        if HOW == "interrupt":
            os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), signal.SIGINT)
            time.sleep(60)
        elif HOW == "crash":
            os._exit(3)
        elif HOW == "exit":
            pytest.exit("enough", returncode=0)
        elif HOW == "fork" and os.fork():
            os.wait()
        assert HOW != "fail"


    def test_last():
        pass
    """


@pytest.mark.parametrize(
    ("how", "options", "statuses"),
    [
        pytest.param("interrupt", (), ("not run", "not run"), id="interrupt"),
        pytest.param("interrupt", ("-n1",), ("not run", "not run"), id="interrupt-xdist", marks=pytest.mark.long),
        pytest.param("fail", ("-x",), ("failed", "not run"), id="first-failure", marks=pytest.mark.long),
        pytest.param("fail", ("-x", "-n1"), ("failed", "not run"), id="first-failure-xdist"),
        pytest.param("exit", (), ("not run", "not run"), id="exit", marks=pytest.mark.long),
        pytest.param("crash", ("-n1", "--max-worker-restart=0"), ("failed", "not run"), id="crash"),
        pytest.param("crash", ("-n1",), ("failed", "passed"), id="replaced-worker", marks=pytest.mark.long),
        pytest.param("fork", (), ("passed", "passed"), id="forked-copy", marks=pytest.mark.long),
        pytest.param("", ("--dist=each", "-n2"), ("passed", "passed"), id="each", marks=pytest.mark.long),
        pytest.param("", ("--collect-only",), ("not run", "not run"), id="collect-only", marks=pytest.mark.long),
        pytest.param("", ("--collect-only", "-n2"), ("not run", "not run"), id="collect-xdist", marks=pytest.mark.long),
        pytest.param("", ("--setup-plan",), ("not run", "not run"), id="setup-plan", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_test_without_verdict_has_not_run(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, how: str, options: tuple[str, ...], statuses: tuple[str, str]
) -> None:
    suite.write("test_it.py", _TESTS_THAT_END_THE_SESSION)
    monkeypatch.setenv("HOW", how)
    suite.run("--accel-record=record.jsonl", "-p", "no:randomly", *options)
    job = _job(suite)
    first = "not run" if "--collect-only" in options or "--setup-plan" in options else "passed"
    assert _statuses(job) == dict(zip(("test_first", "test_ends", "test_last"), (first, *statuses), strict=True))
    assert job.complete


def test_a_session_whose_tests_are_partly_unknown_is_not_complete(suite: Suite) -> None:
    suite.write("test_it.py", "def test_passes():\n    pass\n\n\ndef test_fails():\n    assert False\n")
    suite.write("test_broken.py", "import not_there\n")
    suite.run("--accel-record=record.jsonl", "--continue-on-collection-errors")
    assert _statuses(_job(suite)) == {"test_passes": "passed", "test_fails": "failed"}
    assert not _job(suite).complete
    # With --last-failed, pytest does not collect the tests that have passed.
    (suite.path / "test_broken.py").unlink()
    suite.run("--accel-record=record.jsonl", "--last-failed")
    assert _statuses(_job(suite)) == {"test_fails": "failed"}
    assert not _job(suite).complete
    suite.write("test_broken.py", "raise KeyboardInterrupt\n")
    suite.run("--accel-record=record.jsonl")
    assert not _job(suite).complete


Tests = Mapping[str, tuple[str, str]]
"""The outcome and the reason of each test, by node id."""
PASSED = ("passed", "")
Compare = Callable[..., tuple[int, list[str]]]


def _write(path: Path, tests: Tests, files: Mapping[str, str] = {}, *, complete: bool = True) -> None:
    """Write the record of a session with these tests; an outcome may be "deselected" or "not run", too."""
    file = RecordFile(str(path))
    file("SessionStarted", schema=1)
    for test, (outcome, reason) in tests.items():
        if outcome not in ("deselected", "not run"):
            more = {"missing": reason} if outcome == "missing" else {"skip": reason} if outcome == "skipped" else {}
            outcome = "skipped" if outcome == "missing" else outcome
            for when in ("setup", "call", "teardown"):
                ended = outcome if when == "call" else "passed"
                file("PhaseReported", test=test, when=when, outcome=ended, start=1.0, stop=2.0, **more)
                more = {}
    left_out = [test for test, (outcome, _) in tests.items() if outcome == "deselected"]
    selected = [test for test in tests if test not in left_out]
    file("TestsCollected", tests=selected, deselected=left_out, complete=complete, skipped_files=files)
    file.close()


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Provide a function that compares the records of jobs, and returns exit status and lines of output."""
    monkeypatch.chdir(tmp_path)

    def run(*jobs: str, allow: str | None = None) -> tuple[int, list[str]]:
        if allow is not None:
            Path("allow.txt").write_text(allow, encoding="utf-8")
        status = main(["census", *jobs, *(["--allow", "allow.txt"] if allow is not None else [])])
        return status, capsys.readouterr().out.splitlines()

    return run


def test_tests_that_ran_in_no_job_are_grouped_by_cause(compare: Compare) -> None:
    _write(
        Path("one"),
        {"a.py::ran": PASSED, "a.py::eight": ("missing", "needs 8; there are 1"), "a.py::no": ("skipped", "my\nown")},
    )
    _write(
        Path("two"),
        {
            "a.py::ran": ("deselected", ""),
            "a.py::eight": ("missing", "needs 8; there are 4"),
            "a.py::no": ("deselected", ""),
            "a.py::late": ("not run", ""),
        },
        {"b.py": "no triton", "a.py": "no triton", "pkg": "no triton"},
        complete=False,
    )
    _write(Path("three"), {"pkg/c.py::test": ("failed", "")}, {"b.py": "no triton"})
    assert compare("one", "two", "three") == (
        1,
        [
            "4 of 6 tests ran in none of 3 jobs",
            "",
            "deselected (two)",
            "skipped: my\\nown (one)",
            "    a.py::no",
            "",
            "missing hardware: needs 8; there are 1 (one)",
            "missing hardware: needs 8; there are 4 (two)",
            "    a.py::eight",
            "",
            "not run (two)",
            "    a.py::late",
            "",
            "skipped: no triton (two, three)",
            "    b.py",
            "",
            "not all tests were collected: two",
        ],
    )


def test_the_list_of_allowed_tests_must_be_right(compare: Compare) -> None:
    own = ("skipped", "own")
    _write(
        Path("job"), {"t.py::a[1]": own, "t.py::a[2]": own, "t.py::b[x#y]": own, "t.py::c": PASSED, "t.py::d": PASSED}
    )
    allow = "# known\n\nt.py::a[?]  # needs 8 devices, which we do not have\n  t.py::b[x#y]\t# own\n"
    assert compare("job", allow=allow) == (0, ["2 of 5 tests ran in the job; 3 did not, as allow.txt allows"])
    status, lines = compare("job", allow=f"{allow}t.py::c\nt.py::gone\nt.py::[cd]\nt.py::?\n")
    assert (status, lines) == (
        1,
        [
            "2 of 5 tests ran in the job",
            "",
            "allow.txt is out of date:",
            "    line 5: t.py::c: t.py::c ran in job",
            "    line 6: t.py::gone: there is no such test in any job",
            "    line 7: t.py::[cd]: there is no such test in any job",
            "    line 8: t.py::?: t.py::c ran in job",
            "    line 8: t.py::?: t.py::d ran in job",
        ],
    )
    status, lines = compare("job", allow="t.py::a[1]\n")
    assert (status, lines[0]) == (1, "2 of 5 tests did not run in the job")


def test_a_census_without_tests_is_an_error(compare: Compare) -> None:
    _write(Path("job"), {})
    assert compare("job", "job") == (1, ["no test was collected in 1 job"])


@pytest.mark.parametrize(
    ("content", "arguments", "text"),
    [
        (b"{", ["bad"], "error: bad has no events"),
        (b'{"document": "another"}\n', ["bad"], "error: bad is not a record"),
        (None, ["bad"], "error: bad does not say what became of each test: its session was killed before it ended"),
        (b"", [], "the following arguments are required: FILE"),
        (b"", ["none"], "error: none cannot be read: No such file"),
        (b"\xff", ["good", "--allow", "bad"], "error: bad cannot be read: 'utf-8' codec"),
        (b"", ["good", "--allow", "none"], "error: none cannot be read: [Errno 2]"),
    ],
    ids=["half", "other", "killed", "nothing", "absent", "allow-encoding", "allow-absent"],
)
def test_a_file_that_cannot_be_used_is_a_usage_error(
    compare: Compare, capsys: pytest.CaptureFixture[str], content: bytes | None, arguments: list[str], text: str
) -> None:
    _write(Path("good"), {"a": PASSED})
    if content is None:
        file = RecordFile("bad")
        file("SessionStarted", schema=1)
        file.close()
    else:
        Path("bad").write_bytes(content)
    with pytest.raises(SystemExit) as error:
        main(["census", *arguments])
    assert error.value.code == 2
    assert text in capsys.readouterr().err


def test_control_and_unencodable_characters_of_ids_are_escaped(tmp_path: Path) -> None:
    _write(tmp_path / "a.json", {"é\x1b[2J\udcff::b": ("skipped", "own")})
    command = [sys.executable, "-m", "pytest_accel", "census", "a.json"]
    environ = {"PATH": "", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "1 of 1 test did not run in the job\n\nskipped: own (a.json)\n    \\xe9\\x1b[2J\\udcff::b\n"
