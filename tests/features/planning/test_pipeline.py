"""Tests of a pipeline of jobs on machines of different sizes: selection of tests, durations, and the census."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.run import Run

pytestmark = pytest.mark.long
SUITE = """
    import pytest


    @pytest.mark.parametrize("number", range(3))
    def test_plain(number):
        pass


    @pytest.mark.devices(1)
    def test_one(devices):
        assert len(devices) == 1


    @pytest.mark.distributed([2, 4, 8])
    def test_ranks(world_size, gather):
        assert gather(1) == [1] * world_size


    @pytest.mark.parametrize("number", range(4))
    @pytest.mark.devices(2)
    def test_two(number):
        pass


    @pytest.mark.devices(16)
    def test_sixteen():
        pass
    """
JOBS = {
    # In a session without accelerators, ranks run on the CPU, so `devices == 0` also holds for tests with ranks.
    "cpu": ("--accel", "sim", "--accel-select", "devices == 0 and not marked"),
    "one": ("--accel", "sim:1", "--accel-select", "devices == 1 and fits"),
    "four-1": ("--accel", "sim:4", "--accel-select", "2 <= devices <= 4", "--accel-shard", "1/2", "-n1"),
    "four-2": ("--accel", "sim:4", "--accel-select", "2 <= devices <= 4", "--accel-shard", "2/2", "-n1"),
    "eight": ("--accel", "sim:8", "--accel-select", "devices > 4"),
}


def _run_command(suite: Suite, *arguments: str) -> tuple[int, str]:
    """Run ``python -m pytest_accel`` with `arguments`; return its exit status and output."""
    completed = subprocess.run(
        [sys.executable, "-m", "pytest_accel", *arguments], cwd=suite.path, capture_output=True, text=True, check=False
    )
    return completed.returncode, completed.stdout + completed.stderr


def _run_jobs(suite: Suite, *names: str) -> dict[str, Run]:
    """Run the jobs `names` with the durations of the previous pipeline; return the sessions by job."""
    return {
        name: suite.run(*JOBS[name], "--accel-durations", "times.json", "--accel-census", f"{name}.json")
        for name in names
    }


def test_each_test_runs_in_one_job_or_the_census_names_it(suite: Suite) -> None:
    suite.write("test_it.py", SUITE)
    first = _run_jobs(suite, *JOBS)
    assert {name: run.ret for name, run in first.items()} == dict.fromkeys(JOBS, 0)
    ran = [test for run in first.values() for test, words in run.results.items() if words == ["PASSED"]]
    assert len(ran) == len(set(ran)) == 11
    assert first["eight"].outcomes() == {"test_ranks[world_size=8]": "PASSED", "test_sixteen": "SKIPPED"}

    files = [f"{name}.json" for name in JOBS]
    status, text = _run_command(suite, "census", *files)
    assert status == 1
    assert text.splitlines()[0] == "1 of 12 tests ran in none of 5 jobs"
    assert "test_it.py::test_sixteen" in text
    assert "needs 16 sim devices; the job had 8\ndeselected: cpu.json, one.json, four-1.json, four-2.json\n" in text
    suite.write("known.txt", "test_it.py::test_sixteen  # no such runner\n")
    assert _run_command(suite, "census", "--allow", "known.txt", *files)[0] == 0
    suite.write("known.txt", "test_it.py::test_sixteen\ntest_it.py::test_one\n")
    status, text = _run_command(suite, "census", "--allow", "known.txt", *files)
    assert status == 1
    assert "test_it.py::test_one" in text

    # The next pipeline uses the durations of all jobs. Its census lists the tests of a job whose file is missing.
    durations_files = ("times.json", "times.1-of-2.json", "times.2-of-2.json")
    assert _run_command(suite, "durations", "times.json", *durations_files) == (0, "times.json: times of 11 tests\n")
    before = (suite.path / "times.json").read_bytes()
    second = _run_jobs(suite, "cpu", "four-1", "four-2")
    divisions = {re.findall(r"division (\w{6})", second[name].text)[0] for name in ("four-1", "four-2")}
    assert len(divisions) == 1
    before_and_now = [
        {test: words for name in second for test, words in jobs[name].results.items()} for jobs in (first, second)
    ]
    assert before_and_now[0] == before_and_now[1]
    assert (suite.path / "times.json").read_bytes() != before  # Jobs without `--accel-shard` update the file.
    status, text = _run_command(suite, "census", *(file for file in files if file != "four-2.json"))
    assert status == 1
    missed = {test for test in second["four-2"].results if f" {test}\n" in text}
    assert missed == set(second["four-2"].results)
