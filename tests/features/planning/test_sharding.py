"""Tests of ``--accel-shard`` and ``--accel-durations``: sessions that run one part of a suite and store durations."""

from __future__ import annotations

import json
import re

import pytest

from tests.features.conftest import Suite
from tests.run import Run

pytestmark = pytest.mark.usefixtures("without_torch")

SUITE = """
    import pytest


    @pytest.mark.parametrize("number", range(5))
    def test_plain(number):
        pass


    @pytest.mark.parametrize("number", range(3))
    @pytest.mark.devices(2)
    def test_two(number):
        pass


    @pytest.mark.distributed(2, init=False)
    def test_ranks():
        pass


    @pytest.mark.devices(8)
    def test_too_many():
        pass


    @pytest.mark.parametrize("number", range(2))
    @pytest.mark.dependency
    def test_chain(number):
        pass


    @pytest.mark.parametrize("number", range(2))
    @pytest.mark.xdist_group("server")
    def test_server(number):
        pass
    """


def _division(run: Run) -> str:
    """Return the checksum of the division into parts that `run` shows."""
    found = re.search(r"^accel: part \d+ of \d+: \d+ of \d+ tests, division ([0-9a-f]{6})$", run.text, re.MULTILINE)
    assert found is not None, run.text
    return found[1]


def test_each_selected_test_is_in_one_part_and_each_job_divides_the_suite_in_the_same_way(suite: Suite) -> None:
    suite.ini("markers = dependency")
    suite.write("test_one.py", SUITE)
    suite.write("test_other.py", SUITE)
    whole = suite.run("-p", "randomly", "--accel-durations", "times.json")
    assert whole.ret == 0
    stored = json.loads((suite.path / "times.json").read_text())["tests"]
    assert len(stored) == 26  # All tests that passed.
    before = (suite.path / "times.json").read_bytes()
    runs = []
    for part in (1, 2):
        extra = ("-n1",) if part == 2 else ("-p", "randomly")  # The order of the tests differs between the jobs.
        options = ("--accel-durations", "times.json", "--accel-shard", f"{part}/2", "--accel-select", "fits")
        runs.append(suite.run(*extra, *options))
    # A job does not change the file that the other jobs read: it writes its durations to a file beside it.
    assert (suite.path / "times.json").read_bytes() == before
    times_of_parts = [json.loads((suite.path / f"times.{part}-of-2.json").read_text())["tests"] for part in (1, 2)]
    assert sorted(name for tests in times_of_parts for name in tests) == sorted(stored)
    assert len({_division(run) for run in runs}) == 1
    ran = [test for run in runs for test in run.results]
    assert sorted(ran) == sorted(stored), "only selected tests are divided"
    assert "accel: part 1 of 2: " in runs[0].text
    assert " of 26 tests, division " in runs[0].text
    for together in ("test_one.py::test_chain", "test_one.py::test_server"):
        assert sum(f"{together}[0]" in run.results and f"{together}[1]" in run.results for run in runs) == 1


def test_a_wrong_durations_file_is_a_usage_error(suite: Suite) -> None:
    suite.write("test_it.py", "def test_it():\n    pass\n")
    suite.write("times.json", "{}")
    run = suite.run("--accel-durations", "times.json")
    assert run.ret == 4
    assert f"{suite.path / 'times.json'} cannot be read as a file of durations: " in run.errors
    assert (suite.path / "times.json").read_text() == "{}"
