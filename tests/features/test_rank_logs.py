"""Tests of what ranks log, in the log file and among the live logs of a session, and of ``--setup-show``."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_TESTS = """
    import logging
    import os

    import pytest

    log = logging.getLogger("mine")
    two = pytest.mark.distributed(2, kind="cpu", init=False)


    def test_first():
        log.info("first")


    @pytest.fixture
    def resource(rank):
        log.info("set up")
        yield
        log.info("torn down")


    @two
    def test_two(rank, resource):
        log.debug("not at this level")
        log.info("number %d\\nis it", rank)
        log.info("%s", str(rank) * 100_000)


    @pytest.mark.devices(1)
    def test_device():
        if os.fork() == 0:
            log.info("child\\nof one")
            os._exit(0)
        os.wait()
        log.info("one")


    @two
    def test_death(rank):
        log.info("last words of %d", rank)
        os._exit(3)


    def test_last():
        log.info("last")
    """


def _lines(suite: Suite) -> list[str]:
    """Return the lines of the log file, in order; digits of long lines are reduced to one."""
    text = (suite.path / "run.log").read_text(encoding="utf-8")
    return re.sub(r"(\d)\1{99999}", r"\1...", text).splitlines()


def test_the_log_file_has_the_records_of_ranks_with_their_rank(suite: Suite) -> None:
    suite.write("test_it.py", _TESTS)
    suite.ini(
        """
        log_file = run.log
        log_file_level = INFO
        log_file_format = %(name)s %(message)s
        log_file_mode = a
        accel_schedule = on
        """
    )
    (suite.path / "run.log").write_text("kept\n")
    run = suite.run()
    assert run.count() == {"PASSED": 4, "FAILED": 1}

    lines = _lines(suite)
    of_rank = {rank: [line for line in lines if line.startswith(f"[rank {rank}] ")] for rank in (0, 1)}
    for rank, found in of_rank.items():
        expected = ["mine set up", f"mine number {rank}", "is it", f"mine {rank}...", "mine torn down"]
        assert found == [f"[rank {rank}] {line}" for line in (*expected, f"mine last words of {rank}")]
    ranks = [line[:8] if line.startswith("[rank") else line for line in lines]
    assert ranks[:2] == ["kept", "mine first"]
    assert sorted(ranks[2:12]) == ["[rank 0]"] * 5 + ["[rank 1]"] * 5
    assert ranks[12:15] == ["mine child", "of one", "mine one"]
    assert sorted(ranks[15:]) == ["[rank 0]", "[rank 1]", "mine last"]
    assert ranks[-1] == "mine last"


def test_ranks_capture_the_records_of_a_logger_that_does_not_propagate_and_leave_it_its_handlers(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import logging

        import pytest

        log = logging.getLogger("mine")
        log.propagate = False
        handlers = []


        @pytest.mark.distributed(1, kind="cpu", init=False)
        @pytest.mark.parametrize("turn", [1, 2])
        def test_it(turn, caplog):
            log.warning("turn %d", turn)
            handlers.append((len(log.handlers), len(logging.getLogger().handlers)))
            assert caplog.messages == [f"turn {turn}"]
            assert len(set(handlers)) == 1
            assert turn == 1
        """,
    )
    run = suite.run()
    assert run.count() == {"PASSED": 1, "FAILED": 1}
    assert "WARNING  mine:test_it.py:14 turn 2" in run.text


def test_workers_write_to_one_log_file_and_lose_nothing(suite: Suite) -> None:
    """Each worker opens the file with ``log_file_mode = w``. Live logs and fixtures have no terminal."""
    suite.write(
        "test_it.py",
        """
        import logging

        import pytest

        log = logging.getLogger()


        @pytest.mark.devices(1)
        @pytest.mark.parametrize("number", range(6))
        def test_device(number):
            log.warning("device %d", number)


        @pytest.mark.parametrize("number", range(6))
        def test_plain(number):
            log.warning("plain %d", number)
        """,
    )
    run = suite.run(
        "-n2", "--log-file=run.log", "--log-file-format=%(message)s", "--log-cli-level=INFO", "--setup-show"
    )
    assert run.count() == {"PASSED": 12}
    assert sorted(_lines(suite)) == sorted(f"{kind} {number}" for kind in ("device", "plain") for number in range(6))
    assert "SETUP" not in run.text
    assert "live log" not in run.text


_LIVE = """
    import logging

    import pytest
    from tests.inner import wait_for

    log = logging.getLogger("mine")


    @pytest.fixture(params=["a"])
    def resource(accel):
        log.info("set up")
        yield
        log.info("torn down")


    @pytest.mark.distributed(2, kind="cpu", timeout=60, init=False)
    def test_two(rank):
        print("captured")
        log.info("number %d\\nis it", rank)
        wait_for("seen")


    @pytest.mark.devices(1)
    def test_device(resource):
        log.info("one")
    """

_DEVICE = """\
test_it.py::test_device[a]
SETUP    S accel
-- live log setup --
INFO set up
        SETUP    F resource (fixtures used: accel)['a']
-- live log call --
INFO one
-- live log teardown --
INFO torn down
        TEARDOWN F resource['a']
TEARDOWN S accel
"""


def test_live_logs_and_fixtures_of_ranks_are_shown_while_the_test_runs(suite: Suite) -> None:
    """The ranks' test waits for a file that is created only after its records were read."""
    suite.write("test_it.py", _LIVE)
    (suite.path / "pytest.ini").write_text("[pytest]\naccel = sim:2\nlog_cli_format = %(levelname)s %(message)s\n")
    options = ("--log-cli-level=INFO", "--setup-show", f"--accel-output={suite.path / 'logs'}")
    command = [sys.executable, "-m", "pytest", "-p", "accel", *options]
    text = ""
    with subprocess.Popen(command, cwd=suite.path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        missing = {f"[rank {rank}] {line}\n" for rank in (0, 1) for line in (f"INFO number {rank}", "is it")}
        for line in process.stdout:
            text += line
            missing.discard(line)
            if not missing:
                break
        (suite.path / "seen").touch()
        text += process.stdout.read()
    assert process.returncode == 0, text
    assert "captured" not in text
    assert text.count("\n        test_it.py::test_two (fixtures used: rank, request) ") == 1
    assert text.count("\n[rank 0] SETUP    S rank\n") == 1
    assert "[rank 1] SETUP" not in text
    text = re.sub(r" +(\[ *\d+%\])?\n", "\n", re.sub(r"-{5,}", "--", text))
    assert [len(re.findall(rf"^\[rank {rank}\] -- live log call --$", text, re.MULTILINE)) for rank in (0, 1)] == [1, 1]
    # The rank does not wait until the driver has shown that the setup and the call have passed.
    text, shown = re.subn(r"\n {8}test_it.py::test_device\[a\] \(fixtures used: accel, request, resource\)", "\n", text)
    assert shown == 1
    assert _DEVICE in re.sub(r"\n+", "\n", re.sub(r" *PASSED\n", "\n", text))
    for name in ("world-2-rank-0", "world-2-rank-1"):
        kept = (suite.path / "logs" / f"{name}.log").read_text()
        assert "captured" in kept
        assert "SETUP" not in kept
