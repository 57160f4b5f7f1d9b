"""Tests of ``--accel-record``: the record has the events of a session and agrees with pytest's report."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from pytest_accel import read_record
from pytest_accel.core.record_events import PoolOpened, SessionFinished, TestStarted, WorldAcquired, WorldReady
from pytest_accel.features.record.timeline import Session, TestRun, critical_path, sessions_of, utilisation

if TYPE_CHECKING:
    from pathlib import Path

    from tests.features.conftest import Suite

_TESTS = """
    import os
    import time

    import pytest


    @pytest.fixture
    def broken():
        raise RuntimeError("no fixture")


    @pytest.mark.distributed(2)
    def test_ranks(rank):
        import torch.distributed as dist

        print("hello from", rank)
        dist.barrier()


    @pytest.mark.distributed(2)
    def test_one_rank_fails(rank):
        import torch.distributed as dist

        print("hello from", rank)
        dist.barrier()
        assert rank == 0


    @pytest.mark.distributed(2)
    def test_one_rank_ends(rank):
        if rank == 1:
            os._exit(0)


    @pytest.mark.devices(4)
    def test_all_devices(devices):
        pass


    @pytest.mark.devices(share=0.25)
    def test_share(device):
        pass


    @pytest.mark.devices(9)
    def test_too_many():
        pass


    @pytest.mark.distributed(2, kind="cpu")
    def test_on_cpu():
        pass


    @pytest.mark.devices
    def test_errs(broken):
        pass


    @pytest.mark.devices
    @pytest.mark.xfail(reason="known")
    def test_xfails():
        assert False


    @pytest.mark.xfail
    def test_xpasses():
        pass


    def test_skips():
        pytest.skip("of its own accord")


    def test_plain():
        pass
"""
_VERDICTS = {
    "test_ranks": "passed",
    "test_one_rank_fails": "failed",
    "test_one_rank_ends": "failed",
    "test_all_devices": "passed",
    "test_share": "passed",
    "test_too_many": "skipped",
    "test_on_cpu": "passed",
    "test_errs": "error",
    "test_xfails": "xfailed",
    "test_xpasses": "xpassed",
    "test_skips": "skipped",
    "test_plain": "passed",
}


def _read_session(path: Path) -> Session:
    """Return the only session of the record in the file `path`."""
    (session,) = sessions_of([read_record(path)])
    return session


def _tests(session: Session) -> dict[str, TestRun]:
    """Return the run of each test by the test's name."""
    return {run.test.partition("::")[2]: run for run in session.tests}


def _agreeing_tests(suite: Suite, *options: str) -> tuple[Session, dict[str, TestRun]]:
    """Run the tests with `options`; check that the record agrees with pytest's own report, and return what it has."""
    suite.write("test_it.py", _TESTS)
    run = suite.run("--accel-record=out/record.jsonl", "--junitxml=junit.xml", *options)
    record = suite.path / "out" / "record.jsonl"
    assert f"accel: record of the session: {record}" in run.text
    session = _read_session(record)
    tests = _tests(session)
    assert {name: test.verdict for name, test in tests.items()} == _VERDICTS
    assert session.finished == SessionFinished(1)
    started = {one.event.test: one.event.worker for one in read_record(record) if isinstance(one.event, TestStarted)}
    assert started == {test.test: test.worker for test in session.tests}

    junit = ElementTree.parse(suite.path / "junit.xml").getroot()[0]
    assert junit.get("tests") == str(len(tests))
    verdicts = Counter(test.verdict for test in tests.values())
    assert int(junit.get("failures", 0)) == verdicts["failed"]
    assert int(junit.get("errors", 0)) == verdicts["error"]
    assert int(junit.get("skipped", 0)) == verdicts["skipped"] + verdicts["xfailed"]
    for case in junit.iter("testcase"):
        properties = {one.get("name"): one.get("value") for one in case.iter("property")}
        lanes = [lane.name for lane, _ in tests[case.get("name", "")].lanes if lane.session is None]
        assert properties.get("accel_devices", "") == ",".join(lanes)
    return session, tests


def test_the_record_of_one_process_has_failures_and_captured_output(suite: Suite) -> None:
    _, tests = _agreeing_tests(suite)
    failure = tests["test_one_rank_fails"].failure
    assert failure is not None
    place = next(number for number, line in enumerate(suite.read("test_it.py"), 1) if "assert rank == 0" in line)
    assert (failure.failed_ranks, failure.place) == ((1,), ("test_it.py", place))
    assert "assert 1 == 0" in failure.headline
    assert "assert rank == 0" in failure.failure
    assert failure.output["Captured stdout call [rank 1]"] == "hello from 1\n"
    death = tests["test_one_rank_ends"].failure
    assert death is not None
    assert [rank.ending for rank in death.ranks] == ["passed", "died"]
    assert death.failed_ranks == (1,)
    assert tests["test_errs"].failure is not None
    assert tests["test_xfails"].phases[1].xfail == "known"
    assert tests["test_skips"].skip == "of its own accord"
    assert tests["test_too_many"].missing == "needs 9 sim devices; there are 4: 4 x sim"
    passed = tests["test_ranks"].phases[-1]
    assert passed.output == {}  # Only the size of the output is recorded.
    assert passed.output_sizes == {f"Captured stdout call [rank {rank}]": len("hello from 0\n") for rank in (0, 1)}


def test_the_record_of_two_workers_has_devices_and_a_critical_path(suite: Suite) -> None:
    session, tests = _agreeing_tests(suite, "-n2")
    pools = [one.event for one in read_record(suite.path / "out/record.jsonl") if isinstance(one.event, PoolOpened)]
    assert [pool.kind for pool in pools] == ["sim"]
    assert [(lane.kind, lane.name, lane.host) for lane in session.devices] == [
        ("sim", f"sim-{number}", session.host) for number in range(4)
    ]
    assert {lane.name for lane, share in tests["test_all_devices"].lanes if share == 1} == {
        f"sim-{n}" for n in range(4)
    }
    assert [share for _, share in tests["test_share"].lanes] == [0.25]
    assert [(lane.kind, lane.session) for lane, _ in tests["test_on_cpu"].lanes] == [("slot", 0)] * 2
    assert tests["test_plain"].lanes == tests["test_too_many"].lanes == ()
    assert {test.worker for test in tests.values()} == {"gw0", "gw1"}
    for name in ("test_ranks", "test_one_rank_fails"):
        assert [rank.ending for rank in tests[name].phases[1].ranks] == ["passed", _VERDICTS[name]]
        assert session.span.start < tests[name].span.start < tests[name].span.stop < session.span.stop
    most = max(used for _, used in utilisation([session]))
    assert most == 4

    path = critical_path(session)
    assert (path[0].span.start, path[-1].span.stop) == session.span
    for step, following in pairwise(path):
        assert step.span.stop == following.span.start
        assert step.span.seconds > 0
    assert {"test", "ranks", "other"} <= {step.kind for step in path}


def test_the_record_has_the_worlds_and_the_reasons_why_they_ended(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import os

        import pytest


        @pytest.mark.distributed(2)
        def test_first():
            pass


        @pytest.mark.distributed(2)
        def test_ends(rank):
            if rank:
                os._exit(3)


        @pytest.mark.distributed(2)
        def test_other_ranks():
            pass


        @pytest.mark.devices(4)
        def test_needs_all():
            pass
        """,
    )
    suite.run("--accel-record=record.jsonl")
    record = read_record(suite.path / "record.jsonl")
    (session,) = sessions_of([record])
    first, second, third = session.worlds
    assert (first.about, first.killed) == ("2 on sim", True)
    acquired = [one.event.world for one in record if isinstance(one.event, WorldAcquired)]
    assert acquired.count(first.number) == 1
    assert "exited with status 3" in first.why_ended
    assert (second.why_ended, second.killed) == ("another request waits for its devices", False)
    assert (third.why_ended, third.about) == ("the session ends", "sim")
    for world in session.worlds:
        assert world.ready is not None
        assert world.gone is not None
        assert world.starting < world.ready < world.gone
    tests = _tests(session)
    assert [tests[name].world for name in ("test_first", "test_ends", "test_other_ranks", "test_needs_all")] == [
        *(first, first),
        *(second, third),
    ]
    wait = tests["test_needs_all"].wait
    assert wait is not None
    assert "test_it.py::test_needs_all waits for 4 sim devices: " in wait.why
    pids = [one.event.pids for one in record if isinstance(one.event, WorldReady)]
    assert len({pid for world in pids for pid in world}) == 5


def test_a_phase_lasts_until_ranks_that_did_not_report_have_ended(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import os
        import threading
        import time

        import pytest

        @pytest.mark.distributed(2, timeout=1)
        def test_one_rank_hangs(rank):
            if rank == 0:
                threading.Event().wait()

        @pytest.mark.distributed(2)
        def test_one_rank_dies(rank):
            if rank == 0:
                time.sleep(1)
                os._exit(3)

        @pytest.fixture
        def hanging(rank):
            yield
            if rank == 0:
                threading.Event().wait()

        @pytest.mark.distributed(2, timeout=1)
        def test_one_rank_hangs_in_its_teardown(hanging):
            pass
        """,
    )
    run = suite.run("--accel-record=record.jsonl", "--junitxml=junit.xml", "--durations=0", "-vv")
    assert run.count() == {"FAILED": 2, "PASSED": 1, "ERROR": 1}
    shown = re.findall(r"^(\S+)s (?:call|teardown) +test_it.py::(\w+)$", run.text, re.MULTILINE)
    assert {test for seconds, test in shown if float(seconds) >= 1.0} == {
        "test_one_rank_hangs",
        "test_one_rank_dies",
        "test_one_rank_hangs_in_its_teardown",
    }
    cases = ElementTree.parse(suite.path / "junit.xml").getroot()[0].iter("testcase")
    assert all(float(case.get("time", "0")) >= 1.0 for case in cases)
    for test in _tests(_read_session(suite.path / "record.jsonl")).values():
        last = max((phase for phase in test.phases if phase.ranks), key=lambda phase: phase.stop - phase.start)
        assert test.span.seconds >= 1.0
        assert test.device_seconds >= 2.0
        assert {rank.rank: rank.ending for rank in last.ranks}[0] in ("hung", "died")
        assert last.ranks[0].stop - last.ranks[0].start >= 1.0


def test_the_record_has_each_run_of_a_test_that_is_rerun(suite: Suite) -> None:
    pytest.importorskip("pytest_rerunfailures")
    suite.plugin("rerunfailures")
    suite.write(
        "test_it.py",
        """
        from pathlib import Path

        import pytest


        @pytest.mark.distributed(2)
        def test_second_time():
            import torch.distributed as dist

            marker = Path(__file__).with_name("was_run")
            first = not marker.exists()
            dist.barrier()
            marker.touch()
            assert not first
        """,
    )
    run = suite.run("--accel-record=record.jsonl", "--reruns=1")
    assert run.count() == {"RERUN": 1, "PASSED": 1}
    assert [test.verdict for test in _read_session(suite.path / "record.jsonl").tests] == ["rerun", "passed"]


def test_the_record_of_a_session_without_marks_has_no_pool(suite: Suite) -> None:
    suite.write("test_it.py", "def test_plain(): pass\n")
    suite.run("--accel-record=record.jsonl")
    record = read_record(suite.path / "record.jsonl")
    assert not any(isinstance(one.event, PoolOpened) for one in record)
    (session,) = sessions_of([record])
    assert (session.worlds, session.devices) == ([], {})
    assert [test.verdict for test in session.tests] == ["passed"]
    assert utilisation([session]) == []
    assert [step.kind for step in critical_path(session)] == ["other", "test", "other"]


def test_properties_whose_names_are_no_strings_do_not_end_a_session(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        def test_numbers(record_property): record_property(7, 1)
        def test_unhashable(record_property): record_property([], 1)
        """,
    )
    run = suite.run("--accel-record=record.jsonl")
    assert run.count() == {"PASSED": 2}
    assert run.ret == 0
    tests = _tests(_read_session(suite.path / "record.jsonl"))
    assert [test.verdict for test in tests.values()] == ["passed", "passed"]


def test_a_path_that_cannot_be_written_is_a_usage_error(suite: Suite) -> None:
    suite.write("test_it.py", "def test_plain(): pass\n")
    run = suite.run("--accel-record=/proc/record.jsonl")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --accel-record: /proc/record.jsonl cannot be written: " in run.errors


def test_an_old_record_is_removed_if_pytest_fails_to_start(suite: Suite) -> None:
    """If a conftest fails, pytest exits before it calls any hook of a session."""
    suite.write("record.jsonl", "{}")
    suite.write("conftest.py", "1 / 0")
    assert suite.run("--accel-record=record.jsonl").ret == pytest.ExitCode.USAGE_ERROR
    assert not (suite.path / "record.jsonl").exists()


@pytest.mark.parametrize("option", ["--accel-record", "--accel-report", "--accel-log"])
def test_a_test_file_is_not_overwritten_if_a_value_was_forgotten(suite: Suite, option: str) -> None:
    path = suite.write("test_it.py", "def test_it():\n    pass\n")
    text = path.read_text()
    run = suite.run(option, "test_it.py")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {option} test_it.py: it exists and has other content, which would be lost; name a new" in run.errors
    assert path.read_text() == text
