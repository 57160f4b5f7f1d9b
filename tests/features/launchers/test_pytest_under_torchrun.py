"""Tests of ``torchrun -m pytest``, which starts one session with a rank in each process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest

from pytest_accel.features.record.census import read_job
from tests.background_suite import BackgroundSuite, torchrun
from tests.deadline import eventually
from tests.features.launchers.launcher_sessions import PASSES, RANKS, expect_one_session, launched_process, suites

PROGRAM = torchrun(2)


@pytest.fixture
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundSuite]:
    """Yield an empty suite."""
    with suites(tmp_path_factory) as made:
        yield made


def test_the_processes_of_torchrun_are_one_session(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", RANKS)

    run = suite.start("--junitxml=report.xml", "--accel-record=record.jsonl", program=PROGRAM).finish()

    expect_one_session(suite, run, "torchrun")
    job = read_job(str(suite.path / "record.jsonl"))
    statuses = {nodeid.partition("::")[2]: outcome.status for nodeid, outcome in job.tests.items()}
    missing = dict.fromkeys(("test_more", "test_of_an_mpi_job"), "missing hardware")
    assert statuses == {**dict.fromkeys(PASSES, "passed"), **missing}
    assert job.complete


ENDLESS = """
    import threading
    from pathlib import Path

    import pytest


    @pytest.mark.distributed(2)
    def test_endless(rank):
        Path(__file__).with_name(f"rank-{rank}").write_text("here\\n")
        threading.Event().wait()


    def test_next():
        pass
"""


@pytest.mark.long
def test_a_launched_process_that_is_killed_is_named_and_ends_the_session(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", ENDLESS)
    session = suite.start(program=PROGRAM)
    suite.read("rank-0")
    suite.read("rank-1")
    agent = launched_process(suite, "RANK", "1")

    agent.kill()
    run = session.finish()

    assert f"torchrun has lost rank 1 (pid {agent.pid})" in run.text
    assert "test_next" not in run.outcomes()
    assert run.ret == 1


@pytest.mark.long
def test_nothing_is_left_if_the_process_of_rank_0_is_killed(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", ENDLESS)
    session = suite.start(program=PROGRAM)
    suite.read("rank-0")
    suite.read("rank-1")

    launched_process(suite, "RANK", "0").kill()
    run = session.finish()

    assert run.ret == 1
    assert "passed" not in run.text


@pytest.mark.long
def test_xdist_is_refused(suite: BackgroundSuite) -> None:
    suite.write("pytest.ini", "[pytest]\n")
    suite.write("test_it.py", RANKS)

    run = suite.start("-n", "2", program=PROGRAM, environment={"PYTEST_ACCEL_LAUNCHER": "on"}).finish()

    assert run.text.count("ERROR: -n 2 under torchrun: use only one of the two.") == 1
    assert run.ret == 1


_ALONE = """
    import os
    from pathlib import Path

    import pytest

    OF_LAUNCHER = {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    IN_USE = Path(__file__).with_name("in-use")


    @pytest.mark.devices(1)
    @pytest.mark.parametrize("number", range(3))
    def test_device(number, devices):
        assert not OF_LAUNCHER & os.environ.keys()
        IN_USE.touch(exist_ok=False)  # Another process would have the only device, too.
        IN_USE.unlink()


    def test_unmarked():
        assert os.environ["WORLD_SIZE"] == "2"
        assert OF_LAUNCHER <= os.environ.keys()


    @pytest.mark.distributed(3, kind="cpu")
    def test_more_ranks_than_processes(gather):
        assert gather(os.environ["RANK"]) == ["0", "1", "2"]
"""


@pytest.mark.long(except_for="alone")
@pytest.mark.parametrize("options", [pytest.param((), id="alone"), pytest.param(("-n2",), id="workers")])
def test_each_process_is_a_session_by_itself_unless_it_is_asked(
    suite: BackgroundSuite, options: tuple[str, ...]
) -> None:
    suite.write("pytest.ini", "[pytest]\naccel = sim:1,shared\nfilterwarnings = error\n")
    suite.write("test_it.py", _ALONE)
    files = ("--accel-record=record.jsonl", "--accel-durations=times.json", "--accel-output=logs")

    run = suite.start(*files, *options, program=PROGRAM).finish()

    line = "accel: torchrun has started 2 processes, each with its own session; --accel-launcher on makes one session"
    assert run.text.count(line) == 2, run.text
    assert run.ret == 0, run.text
    for name in ("", ".rank-1"):
        job = read_job(str(suite.path / f"record{name}.jsonl"))
        assert len(job.tests) == 5
        assert {outcome.status for outcome in job.tests.values()} == {"passed"}
        assert "test_more_ranks_than_processes" in (suite.path / f"times{name}.json").read_text()
        assert len(list((suite.path / f"logs{name}").glob("world-*-rank-2.log"))) == 1


@pytest.mark.long
def test_tests_that_only_a_rank_has_collected_and_in_a_strict_session_tests_without_a_mark_are_errors(
    suite: BackgroundSuite,
) -> None:
    suite.write(
        "test_it.py",
        """
        import os

        import pytest


        def test_without_mark():
            pass


        @pytest.mark.skip
        def test_skipped():
            pass


        @pytest.mark.distributed(2)
        def test_marked(gather):
            assert gather(1) == [1, 1]


        @pytest.mark.distributed(2)
        @pytest.mark.parametrize("word", ["a", "b"] if os.environ.get("RANK", "0") == "0" else ["a"])
        def test_collected_otherwise(word):
            pass
        """,
    )

    run = suite.start("--accel-strict", program=PROGRAM).finish()

    errors = ("test_without_mark", "test_collected_otherwise[a]", "test_collected_otherwise[b]")
    run.expect({**dict.fromkeys(errors, "ERROR"), "test_skipped": "SKIPPED", "test_marked": "PASSED"})
    assert "has collected 1 of test_collected_otherwise, and the driver 2" in run.failure("test_collected_otherwise[b]")
    text = "so it would run once, not in the 2 processes that torchrun has started (--accel-strict)"
    assert text in run.failure("test_without_mark")
    assert "ran once, not in" not in run.text
    assert run.text.count("1 passed, 1 skipped, 3 errors") == 1
    assert run.ret == 1


@pytest.mark.long
def test_a_stopped_launched_process_does_not_block_the_end_of_the_session(suite: BackgroundSuite) -> None:
    """The ranks of the stopped process continue. The driver ends without an answer from the process."""
    suite.write(
        "test_it.py",
        """
        import time
        from pathlib import Path

        import pytest


        @pytest.mark.distributed(2)
        def test_waits(rank):
            here = Path(__file__)
            here.with_name(f"rank-{rank}").write_text("here\\n")
            while not here.with_name("go").exists():
                time.sleep(0.01)
        """,
    )
    session = suite.start(program=PROGRAM)
    suite.read("rank-1")
    agent = launched_process(suite, "RANK", "1")
    driver = launched_process(suite, "RANK", "0")
    agent.send_signal(signal.SIGSTOP)

    suite.write("go", "")
    eventually("the driver to end", lambda: not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE)
    agent.send_signal(signal.SIGCONT)
    run = session.finish()

    run.expect({"test_waits": "PASSED"})
    assert run.ret == 0


@pytest.mark.long
def test_spread_runs_device_tests_on_all_launched_processes_in_turn(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py",
        """
        import os
        from pathlib import Path

        import pytest


        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.devices(1)
        def test_turn(number):
            Path(__file__).with_name(f"server-{number}").write_text(f"{os.getppid()}\\n")
        """,
    )

    suite.start("--accel-launcher=spread", program=PROGRAM).finish().expect(
        {f"test_turn[{n}]": "PASSED" for n in range(4)}
    )
    first, second, third, fourth = (suite.read(f"server-{number}") for number in range(4))

    assert first != second
    assert (first, second) == (third, fourth)
