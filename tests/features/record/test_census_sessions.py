"""Tests of what a record says of each test: its status, also if the session ends early."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pytest_accel.__main__ import main
from pytest_accel.core.record_events import DevicesThere, MissingNeed, Status, TestsCounted
from pytest_accel.features.record.commands import counted_tests

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_MIXED_TESTS = """
    import pytest


    @pytest.fixture
    def broken():
        raise RuntimeError


    def test_passes():
        pass


    def test_fails():
        assert False


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


    def test_skips():
        pytest.skip("of its own accord")


    @pytest.mark.devices(2)
    @pytest.mark.skip(reason="not for want of hardware")
    def test_is_skipped():
        pass


    @pytest.mark.devices(2)
    def test_two():
        pass


    @pytest.mark.xfail
    @pytest.mark.distributed([2, 8], devices_per_rank=2)
    @pytest.mark.devices(memory="1GiB", kind="sim")
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
_RAN = {
    "test_passes": "passed",
    "test_fails": "failed",
    "test_errs": "error",
    "test_xfails": "xfailed",
    "test_xpasses": "xpassed",
    "test_words[a@one]": "passed",
    "test_words[\\xe9]": "passed",
}
_DID_NOT_RUN = {
    "test_never_runs": "skipped",
    "test_never_gets_there": "skipped",
    "test_skips": "skipped",
    "test_is_skipped": "skipped",
    "test_two": "missing hardware",
    "test_ranks[world_size=2]": "missing hardware",
    "test_ranks[world_size=8]": "missing hardware",
    "test_removed": "deselected",
    "test_left_out": "deselected",
}
_NEED_OF_NINE = MissingNeed(
    devices=9, world_size=1, nodes=1, ranks_per_node=1, kind="sim", memory=0, backend=(), share=1.0
)
"""The need of a test with the mark ``devices(9)``, in a session with simulated devices."""


def read_counted(suite: Suite, file: str = "record.jsonl") -> TestsCounted:
    """Return what the record `file` of a session says of its tests."""
    return counted_tests(str(suite.path / file))


def statuses(counted: TestsCounted) -> dict[str, str]:
    """Return the status of each test by its name."""
    return {nodeid.partition("::")[2]: outcome.status.value for nodeid, outcome in counted.tests.items()}


@pytest.fixture
def mixed(suite: Suite) -> Suite:
    """Return a suite with tests of every status, and a file that is skipped as a whole."""
    suite.write("test_it.py", _MIXED_TESTS)
    suite.write(
        "test_file.py", "import pytest\n\npytest.importorskip('not_there')\n\n\ndef test_in_file():\n    pass\n"
    )
    suite.write("conftest.py", _CONFTEST)
    return suite


def test_the_censuses_of_several_jobs_are_combined(
    mixed: Suite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("-k", "not left_out", "-p", "no:randomly", "--accel-record")
    condition = "devices < 5 or not fits"
    run = mixed.run("--accel=sim:1", f"--accel-select={condition}", "--accel-shard=1/1", *options, "jobs/one.jsonl")
    assert f"accel: record of the session: {mixed.path / 'jobs' / 'one.jsonl'}" in run.text
    one = read_counted(mixed, "jobs/one.jsonl")
    assert statuses(one) == _RAN | _DID_NOT_RUN
    assert one.selection == {
        "-k": "not left_out",
        "--accel-select": condition,
        "--accel-shard": "1/1",
        "arguments": [str(mixed.path)],
    }
    assert one.complete
    assert not one.collect_only
    tests = {nodeid.partition("::")[2]: outcome for nodeid, outcome in one.tests.items()}
    assert tests["test_ranks[world_size=2]"].need == replace(
        _NEED_OF_NINE, devices=4, world_size=2, ranks_per_node=2, memory=1024**3, backend=("gloo",)
    )
    assert tests["test_ranks[world_size=2]"].there == DevicesThere("sim", 1)
    assert tests["test_never_runs"].reason == "[NOTRUN] would segfault"
    assert list(one.skipped_files) == ["test_file.py"]

    # xdist appends the group to the ids of tests under --dist loadgroup.
    mixed.run("--accel=none", "-n1", "--dist=loadgroup", *options, "two.jsonl")
    assert statuses(read_counted(mixed, "two.jsonl")) == _RAN | _DID_NOT_RUN
    assert read_counted(mixed, "two.jsonl").complete

    monkeypatch.chdir(mixed.path)
    capsys.readouterr()  # Discards the output of the sessions.
    assert main(["census", "jobs/one.jsonl", "two.jsonl"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "10 of 17 tests ran in none of 2 jobs",
        "",
        "deselected: jobs/one.jsonl, two.jsonl",
        "    test_it.py::test_left_out",
        "    test_it.py::test_removed",
        "",
        "needs 16 sim devices with >= 1 GiB for 8 ranks; the jobs had 0, 1",
        "    test_it.py::test_ranks[world_size=8]",
        "",
        "needs 2 sim devices; the jobs had 0, 1",
        "    test_it.py::test_two",
        "",
        "needs 4 sim devices with >= 1 GiB for 2 ranks; the jobs had 0, 1",
        "    test_it.py::test_ranks[world_size=2]",
        "",
        "skipped: [NOTRUN] would segfault",
        "    test_it.py::test_never_runs",
        "",
        "skipped: could not import 'not_there': No module named 'not_there'",
        "    test_file.py",
        "",
        "skipped: expected failure in setup",
        "    test_it.py::test_never_gets_there",
        "",
        "skipped: not for want of hardware",
        "    test_it.py::test_is_skipped",
        "",
        "skipped: of its own accord",
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


    if pytest.version_tuple < (9,):  # It has no subtests of its own.
        import contextlib
        import types

        @pytest.fixture
        def subtests():
            return types.SimpleNamespace(test=contextlib.nullcontext)


    def test_ends(subtests):
        with subtests.test("a part"):
            pass
        if HOW == "interrupt":
            os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), signal.SIGINT)
            time.sleep(60)
        elif HOW == "crash":
            os._exit(3)
        elif HOW == "exit":
            pytest.exit("enough", returncode=0)
        assert HOW == "fork" and os.fork() == 0


    def test_last():
        pass


    @pytest.mark.devices(9)
    def test_nine():
        pass
    """
_FORKED_COPY_ENDS_LAST = """
    import os
    import time

    import pytest

    ORIGINAL = os.getpid()


    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish():
        for _ in range(6000 if os.getpid() != ORIGINAL else 0):
            if os.path.exists("record.jsonl"):
                break
            time.sleep(0.01)


    def pytest_unconfigure():
        if os.getpid() == ORIGINAL:
            os.wait()
    """
_LATER_STATUSES = {"test_last": "not run", "test_nine": "not run"}


@pytest.fixture
def ending_suite(suite: Suite) -> Suite:
    """Return a suite with an old record, whose second test ends the session in the way that the variable HOW names."""
    suite.write("test_it.py", _TESTS_THAT_END_THE_SESSION)
    suite.write("record.jsonl", "{}")
    return suite


@pytest.mark.parametrize(
    ("how", "options", "status", "exit_status"),
    [
        pytest.param("interrupt", (), "not run", 2, id="interrupt"),
        pytest.param("interrupt", ("-n1",), "not run", 2, id="interrupt-xdist", marks=pytest.mark.long),
        pytest.param("fail", ("-x",), "failed", 1, id="first-failure", marks=pytest.mark.long),
        pytest.param("fail", ("-x", "-n1"), "failed", 2, id="first-failure-xdist", marks=pytest.mark.long),
        pytest.param("exit", (), "not run", 0, id="exit", marks=pytest.mark.long),
        pytest.param("crash", ("-n1", "--max-worker-restart=0"), "failed", 1, id="crash", marks=pytest.mark.long),
    ],
)
def test_a_session_that_ends_early_is_not_complete(
    ending_suite: Suite,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    options: tuple[str, ...],
    status: str,
    exit_status: int,
) -> None:
    monkeypatch.setenv("HOW", how)
    assert ending_suite.run("--accel-record=record.jsonl", *options).ret == exit_status
    counted = read_counted(ending_suite)
    assert not counted.complete
    assert statuses(counted) == {"test_first": "passed", "test_ends": status, **_LATER_STATUSES}


@pytest.mark.long
def test_a_session_that_cannot_start_leaves_no_record(ending_suite: Suite) -> None:
    ending_suite.write("conftest.py", "raise RuntimeError('broken')\n")
    assert ending_suite.run("--accel-record=record.jsonl").ret == pytest.ExitCode.USAGE_ERROR
    assert not (ending_suite.path / "record.jsonl").exists()


@pytest.mark.long
def test_an_interrupted_collection_is_not_complete(ending_suite: Suite) -> None:
    ending_suite.write("test_interrupted.py", "raise KeyboardInterrupt\n")
    assert ending_suite.run("--accel-record=record.jsonl", "test_interrupted.py", "test_it.py").ret == 2
    counted = read_counted(ending_suite)
    assert not counted.complete
    assert counted.tests == {}


@pytest.mark.long
def test_a_forked_copy_of_the_session_records_nothing(ending_suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ending_suite.write("conftest.py", _FORKED_COPY_ENDS_LAST)
    monkeypatch.setenv("HOW", "fork")
    ending_suite.run("--accel-record=record.jsonl")
    assert statuses(read_counted(ending_suite))["test_ends"] == "failed"


@pytest.mark.long
def test_a_census_with_a_replaced_worker_is_complete(ending_suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOW", "crash")
    ending_suite.run("--accel-record=record.jsonl", "-n1", "-k", "not last")
    counted = read_counted(ending_suite)
    assert counted.complete
    assert statuses(counted) == {
        "test_first": "passed",
        "test_ends": "failed",
        "test_last": "deselected",
        "test_nine": "missing hardware",
    }


@pytest.mark.parametrize(
    ("path", "text"),
    [
        pytest.param("folder", "--accel-record: {}/folder cannot be written: it is not a regular file", id="folder"),
        pytest.param(
            "test_it.py/a.json", "--accel-record: {}/test_it.py/a.json cannot be written: File exists", id="path"
        ),
        pytest.param(
            "/dev/null", "/dev/null cannot be written: it is not a regular file", id="device", marks=pytest.mark.long
        ),
        pytest.param(" ", "argument --accel-record: must be the path of a file, got ' '", id="empty"),
    ],
)
def test_a_path_that_cannot_be_written_is_a_usage_error(suite: Suite, path: str, text: str) -> None:
    suite.write("test_it.py", "def test_it():\n    pass\n")
    (suite.path / "folder").mkdir()
    run = suite.run("--accel-record", path)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert text.format(suite.path) in run.errors
    assert not run.results
    assert "Traceback" not in run.text + run.errors


_MARKED_TESTS = """
    import os

    import pytest


    @pytest.mark.parametrize("number", range(4))
    def test_plain(number):
        pass


    @pytest.mark.distributed(2)
    def test_ranks(rank):
        assert rank == 0, "so that it fails"


    @pytest.mark.devices(1)
    def test_device():
        pass


    @pytest.mark.devices(9)
    def test_nine():
        pass


    @pytest.mark.distributed(2)
    def test_skips_in_ranks():
        pytest.skip("in both")


    @pytest.mark.distributed(2)
    def test_parts(rank, request):
        if pytest.version_tuple >= (9,):  # Before that, pytest has no subtests.
            subtests = request.getfixturevalue("subtests")
            with subtests.test("skipped"):
                pytest.skip("a part")
            with subtests.test("passes"):
                pass
    """
_MARKED_STATUSES = {
    **{f"test_plain[{number}]": "passed" for number in range(3)},
    "test_plain[3]": "deselected",
    "test_ranks": "failed",
    "test_device": "passed",
    "test_nine": "missing hardware",
    "test_skips_in_ranks": "skipped",
    "test_parts": "passed",
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("-n2",), id="load", marks=pytest.mark.long),
        pytest.param(("-n2", "--dist=worksteal", "-o", "accel_schedule=off"), id="worksteal", marks=pytest.mark.long),
        pytest.param(("-n2", "--dist=loadscope"), id="loadscope", marks=pytest.mark.long),
        pytest.param(("--accel-strict", "-o", "accel_schedule=always"), id="strict", marks=pytest.mark.long),
        pytest.param(("test_it.py", "test_it.py", "--keep-duplicates"), id="twice", marks=pytest.mark.long),
    ],
)
def test_the_statuses_of_marked_tests_do_not_depend_on_the_options(suite: Suite, options: tuple[str, ...]) -> None:
    suite.write("test_it.py", _MARKED_TESTS)
    suite.run("--accel-record=record.jsonl", "--deselect=test_it.py::test_plain[3]", *options)
    counted = read_counted(suite)
    assert statuses(counted) == _MARKED_STATUSES
    assert counted.complete
    assert counted.selection["--deselect"] == ["test_it.py::test_plain[3]"]
    (nine,) = (outcome for outcome in counted.tests.values() if outcome.status is Status.MISSING)
    assert nine.need == _NEED_OF_NINE
    assert nine.there == DevicesThere("sim", 4)


@pytest.mark.long
def test_runs_of_a_test_in_several_workers_are_distinguished(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import os
        import time
        from pathlib import Path

        import pytest


        def wait_for(name):
            for _ in range(6000):
                if Path(name).exists():
                    return
                time.sleep(0.01)


        @pytest.fixture
        def first_worker_ends_while_the_second_runs(worker_id):
            yield
            if worker_id == "gw0":
                wait_for("second-worker-runs")


        def test_it(first_worker_ends_while_the_second_runs, worker_id):
            if worker_id == "gw1":
                Path("second-worker-runs").touch()
                wait_for("first-worker-goes-on")


        def test_next(worker_id):
            if worker_id == "gw0":
                Path("first-worker-goes-on").touch()
        """,
    )
    suite.run("-n2", "--dist=each", "--accel-record=record.jsonl")
    counted = read_counted(suite)
    assert counted.complete
    assert statuses(counted) == {"test_it": "passed", "test_next": "passed"}


@pytest.mark.long
def test_the_census_is_incomplete_if_workers_collect_different_tests(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import os

        import pytest


        @pytest.mark.parametrize("worker", ["both", os.environ["PYTEST_XDIST_WORKER"]])
        def test_it(worker):
            pass
        """,
    )
    suite.run("-n2", "--accel-record=record.jsonl")
    counted = read_counted(suite)
    assert not counted.complete
    assert statuses(counted) == {f"test_it[{worker}]": "not run" for worker in ("both", "gw0", "gw1")}


@pytest.mark.long
@pytest.mark.parametrize("options", [("--collect-only",), ("--collect-only", "-n2"), ("--setup-plan",)], ids=" ".join)
def test_tests_that_are_only_collected_have_not_run(suite: Suite, options: tuple[str, ...]) -> None:
    suite.write("test_it.py", _MARKED_TESTS)
    suite.run("--accel-record=record.jsonl", "-k", "plain", *options)
    counted = read_counted(suite)
    assert counted.collect_only == ("--collect-only" in options)
    assert not counted.complete
    assert statuses(counted) == {test: "not run" if "plain" in test else "deselected" for test in _MARKED_STATUSES}


@pytest.mark.long
def test_a_file_that_cannot_be_collected_makes_the_census_incomplete(suite: Suite) -> None:
    suite.write("test_it.py", "def test_passes():\n    pass\n\n\ndef test_fails():\n    assert False\n")
    suite.write("test_broken.py", "import not_there\n")
    suite.run("--accel-record=record.jsonl", "--continue-on-collection-errors")
    counted = read_counted(suite)
    assert statuses(counted) == {"test_passes": "passed", "test_fails": "failed"}
    assert not counted.complete
    (suite.path / "test_broken.py").unlink()
    # With --last-failed, pytest does not collect the tests that have passed.
    suite.run("--accel-record=record.jsonl", "--last-failed")
    counted = read_counted(suite)
    assert statuses(counted) == {"test_fails": "failed"}
    assert counted.selection["--last-failed"]
    assert not counted.complete


@pytest.mark.long
def test_the_last_run_of_a_test_counts(suite: Suite) -> None:
    pytest.importorskip("pytest_rerunfailures")
    suite.plugin("rerunfailures")
    suite.write(
        "test_it.py",
        """
        import pathlib

        import pytest


        @pytest.mark.distributed(2)
        def test_second_time(rank):
            mark = pathlib.Path(f"mark-{rank}")
            if not mark.exists():
                mark.touch()
                pytest.fail("the first time")
        """,
    )
    run = suite.run("--reruns=1", "--accel-record=record.jsonl")
    assert run.result("test_second_time") == "RERUN PASSED"
    assert statuses(read_counted(suite)) == {"test_second_time": "passed"}
