"""Tests of ``--accel-plan``: its output, and that no test is run for it."""

from __future__ import annotations

import json
import re

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_TESTS = """
    import pytest
    from pathlib import Path

    Path("imported").touch()


    @pytest.fixture(autouse=True)
    def note():
        Path("ran").touch()


    @pytest.mark.parametrize("number", range(6))
    @pytest.mark.devices(1)
    def test_one(number):
        pass


    @pytest.mark.distributed(4, init=False)
    def test_four(rank):
        pass


    @pytest.mark.devices(1, memory="40GiB", name="*H100*")
    def test_figures():
        pass


    @pytest.mark.devices(3)
    def test_three():
        pass


    @pytest.mark.skip
    def test_skipped():
        pass


    def test_plain():
        pass
    """


@pytest.fixture
def plan_suite(suite: Suite) -> Suite:
    """Provide a suite that creates the file ``ran`` if a test runs, and fails if the session starts a process."""
    suite.write("test_suite.py", _TESTS)
    suite.write(
        "conftest.py",
        """
        import multiprocessing.process
        import subprocess


        def refuse(*args, **kwargs):
            raise AssertionError("a process is started")


        multiprocessing.process.BaseProcess.start = refuse
        subprocess.Popen.__init__ = refuse
        """,
    )
    return suite


def _worker_numbers(text: str) -> list[str]:
    """Return the numbers of workers that the plan compares: the first column of its table."""
    return re.findall(r"^ +(\d+) +[\d.]+ s(?:   best)?$", text, re.MULTILINE)


@pytest.mark.long
def test_the_plan_for_this_machine_runs_no_test(plan_suite: Suite) -> None:
    run = plan_suite.run("--accel-plan", "--accel=sim:4")
    assert run.ret == 0
    assert "9 tests to run, 2 skipped:" in run.text
    assert re.search(
        r"^    1  needs 1 sim device with >= 40 GiB and name \*H100\*; there are 4", run.text, re.MULTILINE
    )
    assert "    1  marked skip" in run.text
    assert "9 of 9 never timed: counted as 1.0 s" in run.text
    assert _worker_numbers(run.text)[:3] == ["1", "2", "4"]
    assert "11 tests collected" in run.text
    assert "<Function" not in run.text
    assert not run.results
    assert not (plan_suite.path / "ran").exists()
    assert not (plan_suite.path.parent / "locks").exists()


@pytest.mark.long
def test_the_plan_for_another_machine(plan_suite: Suite) -> None:
    run = plan_suite.run("--accel-plan=cuda:3", "-n", "5", "--accel=none")
    assert run.ret == 0
    assert "accel: cuda, 3 devices: 3 x pretended" in run.text
    assert "9 tests to run, 2 skipped:" in run.text
    assert "    1  needs 4 cuda devices; there are 3: 3 x pretended" in run.text
    assert "requirements for memory, capability and name are assumed to be met" in run.text
    assert "5" in _worker_numbers(run.text)
    assert "workers [" not in run.text
    assert not (plan_suite.path / "ran").exists()


@pytest.mark.long
def test_durations_of_sessions_without_xdist_are_used(suite: Suite) -> None:
    suite.write("test_suite.py", _TESTS.replace("(4, ", "(2, "))
    assert suite.run("-k", "one or four").ret == 0
    durations_file = suite.path / ".pytest_cache" / "v" / "accel" / "durations"
    durations = json.loads(durations_file.read_text())
    assert len(durations) == 7
    durations_file.write_text(json.dumps({test: [[1.0, 3.0]] for test in durations}))
    text = suite.run("--accel-plan", "-k", "one or four or plain").text
    assert "1 of 8 never timed: counted as 3.0 s" in text
    assert re.search(r"^ +1 +24\.0 s", text, re.MULTILINE)
    text = suite.run("--accel-plan", "cuda:4", "-k", "one or four").text
    assert "never timed" not in text  # The times on another kind of device count.
    assert re.search(r"^ +1 +21\.0 s", text, re.MULTILINE)
