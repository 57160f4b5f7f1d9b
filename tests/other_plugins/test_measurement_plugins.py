"""Tests of plugins that measure marked tests in ranks: time, memory, calls, lines, and values that tests record."""

from __future__ import annotations

import json
import pstats
import re
import shutil
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.other_plugins.conftest import Pair
    from tests.run import Run

_WORKERS: tuple[tuple[str, ...], ...] = ((), ("-n1",))
"""Options of the sessions of a marked suite, which are compared with one session of the plain suite."""


# pytest-monitor

_NODEID_CONFTEST = """
    import pytest

    # pytest-monitor 1.6 reads `_nodeid`, which pytest 9.2 has no more.
    if not hasattr(pytest.Module, "_nodeid"):
        pytest.Module._nodeid = property(lambda self: self.nodeid)
    """
_MONITORED = """
    import pytest

    pytest_monitor_component = "allocator"

    def test_plain():
        assert bytearray(10**6)

    @pytest.mark.distributed(2)
    @pytest.mark.parametrize("size", [1, 2])
    def test_ranks(size):
        assert bytearray(size * 10**6)

    @pytest.mark.distributed(2)
    def test_fails(request):
        assert not hasattr(request.config, "never") and 0

    @pytest.mark.devices(1)
    @pytest.mark.monitor_skip_test
    def test_skipped_by_the_monitor():
        pass
    """


def read_monitor_database(suite: Suite) -> tuple[int, list[tuple[Any, ...]]]:
    """Return the number of sessions in the database of pytest-monitor, and its rows without times."""
    database = sqlite3.connect(suite.path / ".pymon")
    try:
        sessions = database.execute("select count(*) from TEST_SESSIONS").fetchone()[0]
        names = "ITEM, ITEM_PATH, ITEM_VARIANT, ITEM_FS_LOC, KIND, COMPONENT, CPU_USAGE >= 0, TOTAL_TIME < 60"
        return sessions, sorted(database.execute(f"select {names} from TEST_METRICS").fetchall())
    finally:
        database.close()


@needs("pytest_monitor")
def test_monitor_has_one_session_and_one_row_for_each_test(pair: Pair) -> None:
    """With xdist, the controller and each worker have one session."""
    pair.plugin("monitor")
    pair.write("conftest.py", _NODEID_CONFTEST)
    pair.write("test_x.py", _MONITORED)
    plain = pair.plain.run("-W", "ignore")
    sessions, rows = read_monitor_database(pair.plain)
    assert sessions == 1
    assert [row[2] for row in rows] == ["test_plain", "test_ranks[1]", "test_ranks[2]"]
    for workers in _WORKERS:
        (pair.marked.path / ".pymon").unlink(missing_ok=True)
        pair.run_marked(plain, *workers, "-W", "ignore")
        assert read_monitor_database(pair.marked) == (2 if workers else 1, rows)


@needs("pytest_monitor")
def test_monitor_records_only_tests_that_pass_on_all_ranks(suite: Suite) -> None:
    suite.plugin("monitor")
    suite.write("conftest.py", _NODEID_CONFTEST)
    suite.write(
        "test_x.py",
        """
        import pytest

        @pytest.mark.distributed(2)
        def test_fails_on_one(rank):
            assert rank == 0

        @pytest.mark.distributed(2)
        def test_largest(rank):
            global kept  # pytest-monitor looks once more when the test has returned.
            kept = bytearray(b"x") * (rank * 64 * 2**20)
        """,
    )
    run = suite.run("-W", "ignore")
    assert run.outcomes() == {"test_fails_on_one": "FAILED", "test_largest": "PASSED"}
    database = sqlite3.connect(suite.path / ".pymon")
    rows = database.execute("select ITEM, MEM_USAGE from TEST_METRICS").fetchall()
    database.close()
    assert [name for name, _ in rows] == ["test_largest"]
    assert 64 <= rows[0][1] < 400  # Rank 1's memory in MiB, above that of a rank at its start.
    refused = suite.run("--restrict-scope-to=function,module", "-W", "ignore")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "--restrict-scope-to=function,module: pytest-monitor cannot measure a module" in refused.text + refused.errors
    )


@needs("pytest_monitor")
def test_disabled_monitor_refuses_no_option(pair: Pair) -> None:
    pair.plugin("monitor")
    pair.write("conftest.py", _NODEID_CONFTEST)
    pair.write("test_x.py", _MONITORED)
    pair.run_both("--no-monitor", "--restrict-scope-to=module", "-W", "ignore")
    assert not (pair.marked.path / ".pymon").exists()


# pytest-memray

_MEMORY = """
    import pytest

    def test_plain():
        assert bytearray(3 * 10**6)

    @pytest.mark.distributed(2)
    def test_ranks():
        assert bytearray(2 * 10**6)

    @pytest.mark.distributed(2)
    @pytest.mark.limit_memory("1 MB")
    def test_too_much():
        assert bytearray(4 * 10**6)

    @pytest.mark.distributed(2)
    @pytest.mark.limit_memory("9 MB")
    def test_within():
        assert bytearray(5 * 10**6)

    @pytest.mark.devices(1)
    def test_device():
        assert bytearray(6 * 10**6)
    """


def parse_allocations(run: Run) -> list[tuple[str, str, str]]:
    """Return each test in a report of pytest-memray, with its memory and the function that allocated most of it."""
    pattern = r"^Allocation results for (\S+) at .*\n\n.*allocated: (\S+)\n(?:.*\n){3}\t\t- (\w+):"
    return re.findall(pattern, run.text, re.MULTILINE)


@needs("pytest_memray")
def test_memray_reports_marked_tests(pair: Pair) -> None:
    pair.plugin("memray")
    pair.write("test_x.py", _MEMORY)
    options = ("--memray", "--most-allocations=0", "--memray-bin-path=bins", "--memray-bin-prefix=of")
    plain = pair.plain.run(*options)
    assert [name for name, _, _ in parse_allocations(plain)] == [
        f"test_x.py::test_{test}" for test in ("device", "within", "too_much", "plain", "ranks")
    ]
    runs = [plain]
    for workers in _WORKERS:
        shutil.rmtree(pair.marked.path / "bins", ignore_errors=True)
        marked = pair.run_marked(plain, *options, *workers)
        assert parse_allocations(marked) == parse_allocations(plain)
        dumps = [sorted(path.name for path in (one.path / "bins").rglob("*")) for one in (pair.plain, pair.marked)]
        assert dumps[1] == dumps[0]
        runs.append(marked)
    for run in runs:
        assert "Test was limited to 1.0MiB but allocated 3.8MiB" in run.text
        assert "MEMORY PROBLEMS test_x.py::test_too_much" in run.text
        assert "Created 5 binary dumps at" in run.text


@needs("pytest_memray")
def test_memray_judges_each_rank_and_compares_the_highest_peak_with_the_last_run(suite: Suite) -> None:
    suite.plugin("memray")
    suite.write(
        "test_x.py",
        """
        import os

        import pytest

        @pytest.mark.distributed(2)
        @pytest.mark.limit_memory("3 MB")
        def test_one_rank_has_too_much(rank):
            assert bytearray((1 + 3 * rank) * 10**6)

        @pytest.mark.distributed(2)
        @pytest.mark.limit_memory("30 MB")
        def test_grows(rank):
            assert bytearray((1 + rank) * int(os.environ.get("SIZE", "1")) * 10**6)
        """,
    )
    run = suite.run("--memray", "--fail-on-increase")
    assert "rank 1: failed" in run.failure("test_one_rank_has_too_much")
    assert "memray-max-memory [rank 1]" in run.text
    assert "test_x.py::test_grows PASSED" in run.text
    suite.write("conftest.py", "import os\nos.environ['SIZE'] = '2'\n")
    run = suite.run("--memray", "--fail-on-increase", "-k", "grows")
    assert run.ret == 1
    assert re.search(r"Test previously used 1\.9MiB but now uses 3\.8MiB", run.text)
    assert "[rank " not in run.text  # The driver compares, not a rank: it has the peak of the last run.


# Profilers

_PROFILED = """
    import pytest
    from work import slow

    def test_plain():
        slow(1)

    @pytest.mark.distributed(2)
    @pytest.mark.line_profile.with_args(slow)
    def test_ranks():
        slow(2)
        slow(2)

    @pytest.mark.distributed(2)
    @pytest.mark.line_profile.with_args(slow)
    def test_fails():
        slow(3)
        assert 0

    @pytest.mark.devices(1)
    @pytest.mark.line_profile.with_args(slow)
    def test_device():
        slow(4)
    """
_WORK = """
    def slow(n):
        total = 0
        for part in range(n):
            total += part
        return total
    """


def count_calls(suite: Suite) -> dict[str, int]:
    """Return the number of calls of the function `slow` in each file with a profile."""
    found = {}
    for path in (suite.path / "prof").iterdir():
        stats: dict[tuple[str, int, str], Any] = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]
        found[path.name] = sum(numbers[1] for (_, _, name), numbers in stats.items() if name == "slow")
    return found


@needs("pytest_profiling")
def test_profiles_of_marked_tests_are_those_of_rank_0(pair: Pair) -> None:
    pair.plugin("profiling")
    pair.write("conftest.py", "def pytest_configure(config):\n    config.addinivalue_line('markers', 'line_profile')\n")
    pair.write("work.py", _WORK)
    pair.write("test_x.py", _PROFILED)
    plain, marked = pair.run_both("--profile")
    tests = {f"test_{test}.prof": count for test, count in (("plain", 1), ("ranks", 2), ("fails", 1), ("device", 1))}
    assert count_calls(pair.marked) == count_calls(pair.plain) == {**tests, "combined.prof": 5}
    assert "Profiling (from" in plain.text
    assert "Profiling (from" in marked.text
    shutil.rmtree(pair.marked.path / "prof")
    pair.run_marked(plain, "--profile", "-n", "2")
    assert count_calls(pair.marked).keys() == count_calls(pair.plain).keys()
    assert count_calls(pair.marked).items() >= tests.items()  # Workers overwrite each other's combined file.


@needs("pytest_profiling")
def test_the_profile_of_a_dead_rank_is_left_out(suite: Suite) -> None:
    """pytest-profiling has one file for all tests with the same name, and sums up all files at the end."""
    suite.plugin("profiling")
    suite.write("work.py", _WORK)
    for name, end in (("first", "pass"), ("second", "os._exit(1)")):
        suite.write(
            f"test_{name}.py",
            f"""
            import os

            import pytest
            from work import slow

            def test_plain_{name}():
                slow(1)

            @pytest.mark.distributed(2)
            def test_ranks():
                slow(2)
                {end}
            """,
        )
    run = suite.run("--profile")
    assert [run.result(f"test_{name}.py::test_ranks") for name in ("first", "second")] == ["PASSED", "FAILED"]
    assert count_calls(suite) == {"test_plain_first.prof": 1, "test_plain_second.prof": 1, "combined.prof": 2}
    assert "Profiling (from" in run.text


@needs("pytest_line_profiler")
def test_line_profiles_of_marked_tests_are_those_of_rank_0(pair: Pair) -> None:
    pair.plugin("line-profiler")
    pair.write("work.py", _WORK)
    pair.write("test_x.py", _PROFILED)
    texts = []
    for run in pair.run_both():
        hits = re.findall(r"Line Profile result for (\S+) =|^ +4 +(\d+) ", run.text, re.MULTILINE)
        texts.append([name or count for name, count in hits])
    assert texts[1] == texts[0] == ["test_x.py::test_ranks", "6", "test_x.py::test_device", "5"]


# pytest-durations


@needs("pytest_durations")
def test_durations_of_marked_tests_and_fixtures_are_those_of_ranks(pair: Pair) -> None:
    pair.plugin("pytest_durations")
    pair.write(
        "conftest.py",
        """
        import os

        def pytest_runtest_logreport(report):
            if "RANK" in os.environ and report.nodeid == "test_x.py::test_ranks" and report.when == "setup":
                with open("setups", "a") as file:
                    file.write(f"{report.duration}\\n")
        """,
    )
    pair.write(
        "test_x.py",
        """
        import os
        import time

        import pytest

        @pytest.fixture
        def data():
            time.sleep(0.01)

        def test_plain(data):
            pass

        @pytest.mark.distributed(2)
        def test_ranks(data):
            time.sleep(0.5)

        @pytest.mark.distributed(2)
        def test_fails(data):
            assert 0

        @pytest.mark.distributed(2)
        def test_dies(data):
            if os.environ.get("RANK") == "1":
                time.sleep(0.5)
                os._exit(3)
            assert "RANK" in os.environ

        @pytest.mark.skip
        @pytest.mark.distributed(2)
        def test_skipped(data):
            pass
        """,
    )
    option = "--pytest-durations-json=out.json"
    plain = pair.plain.run(option)
    expected = _count_durations(_read_durations(pair.plain))
    for workers in _WORKERS:
        pair.run_marked(plain, option, *workers)
        marked = _read_durations(pair.marked)
        assert _count_durations(marked) == expected
        assert _count_durations(marked)["fixture"]["test_x.py::data"] == 4
        assert marked["fixture"]["test_x.py::data"]["min"] >= 0.01
        assert marked["test call"]["test_x.py::test_ranks"]["total"] >= 0.5
        assert marked["test call"]["test_x.py::test_dies"]["total"] >= 0.5
        # The driver's own setup phase takes longer: it waits until all ranks have passed theirs.
        setups = [float(line) for line in pair.marked.read("setups")]
        (pair.marked.path / "setups").unlink()
        assert len(setups) == 2
        assert 0.01 <= marked["test setup"]["test_x.py::test_ranks"]["total"] <= max(setups)


def _read_durations(suite: Suite) -> dict[str, dict[str, Any]]:
    """Return the entries of the file of pytest-durations by category and name, and remove the file."""
    file = suite.path / "out.json"
    categories = json.loads(file.read_text())["categories"]
    file.unlink()
    return {name: {entry["name"]: entry for entry in entries} for name, entries in categories.items()}


def _count_durations(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the number of calls of each entry in the result of `_read_durations`."""
    return {category: {name: entry["calls"] for name, entry in entries.items()} for category, entries in found.items()}


# pytest-harvest

_HARVEST = """
    import json
    from pathlib import Path

    import pytest
    from pytest_harvest import get_session_results_dct, saved_fixture

    @pytest.fixture(params=[1, 2])
    @saved_fixture
    def size(request):
        return request.param

    def pytest_sessionfinish(session):
        if hasattr(session.config, "workerinput") or session.config.pluginmanager.has_plugin("accel-rank"):
            return
        tests = get_session_results_dct(session)
        told = {
            name: [
                one["status"],
                [status for status, _ in one["status_details"].values()],
                one["params"],
                sorted((key, repr(value)) for key, value in one["fixtures"].items()),
            ]
            for name, one in tests.items()
        }
        Path("out.json").write_text(json.dumps(told))
    """
_HARVESTED = """
    import pytest

    def test_plain(results_bag, size):
        results_bag.score = 0.5 * size

    @pytest.mark.distributed(2)
    def test_ranks(results_bag, size):
        results_bag.score = 0.25 * size
        results_bag["parts"] = [{"a": (1, None)}]

    @pytest.mark.distributed(2)
    def test_fails(results_bag):
        results_bag.score = 1
        assert 0

    @pytest.mark.distributed(2)
    def test_empty():
        pass

    def test_last(module_results_dct):
        assert module_results_dct["test_ranks[2]"]["fixtures"]["results_bag"].score == 0.5
    """


@needs("pytest_harvest")
def test_harvest_has_the_results_of_marked_tests(pair: Pair) -> None:
    pair.plugin("harvest")
    pair.write("conftest.py", _HARVEST)
    pair.write("test_x.py", _HARVESTED)
    plain, _ = pair.run_both("-W", "ignore")
    expected, results = (json.loads((one.path / "out.json").read_text()) for one in (pair.plain, pair.marked))
    assert results == expected
    failed = ["failed", ["passed", "failed", "passed"], {}, [["results_bag", "ResultsBag:\n{'score': 1}"]]]
    assert results["test_x.py::test_fails"] == failed

    # Under xdist, `module_results_dct` has the results of the worker only.
    (pair.marked.path / "out.json").unlink()
    pair.marked.write("test_x.py", _HARVESTED.partition("def test_last")[0])
    marked = pair.marked.run("-W", "ignore", "-n1")
    assert {**marked.outcomes(), "test_last": "PASSED"} == plain.outcomes()
    assert marked.ret == plain.ret
    del expected["test_x.py::test_last"]
    assert json.loads((pair.marked.path / "out.json").read_text()) == expected


@needs("pytest_harvest", "numpy")
def test_harvest_refuses_values_that_cannot_be_sent_from_ranks(suite: Suite) -> None:
    suite.plugin("harvest")
    suite.write(
        "test_x.py",
        """
        import numpy
        import pytest

        @pytest.mark.distributed(2)
        def test_each_rank(results_bag, rank):
            import torch

            results_bag.loss = torch.tensor(rank + 1.5)
            results_bag.score = numpy.float64(0.5)
            results_bag[f"of {rank}"] = numpy.int64(rank)

        @pytest.mark.distributed(2)
        def test_object(results_bag):
            results_bag.model = object()

        @pytest.mark.distributed(2)
        def test_asks(session_results_dct):
            pass

        def test_last(module_results_dct):
            bag = module_results_dct["test_each_rank"]["fixtures"]["results_bag"]
            assert dict(bag) == {"loss": 1.5, "score": 0.5, "of 0": 0, "of 1": 1}
        """,
    )
    run = suite.run("-W", "ignore")
    assert run.outcomes() == {
        "test_each_rank": "PASSED",
        "test_object": "PASSED ERROR",
        "test_asks": "ERROR",
        "test_last": "PASSED",
    }
    assert "pytest-harvest: results_bag['model'] is of type builtins.object, which cannot be sent" in run.text
    assert "the fixture session_results_dct does not work in ranks, because only the driver has the results" in run.text


# pytest-codspeed


@needs("pytest_codspeed")
def test_codspeed_is_refused_while_it_measures(pair: Pair) -> None:
    pair.plugin("codspeed")
    pair.write(
        "test_x.py",
        """
        import pytest

        @pytest.mark.distributed(2)
        def test_ranks(codspeed_benchmark):
            assert codspeed_benchmark(sum, [1, 2]) == 3

        def test_plain(codspeed_benchmark):
            assert codspeed_benchmark(sum, [1, 2]) == 3
        """,
    )
    pair.run_both()
    options = ("--codspeed", "--codspeed-warmup-time=0.01", "--codspeed-max-time=0.01")
    refused = pair.marked.run(*options)
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert "pytest-codspeed cannot measure marked tests" in refused.text + refused.errors
    run = pair.marked.run(*options, "-m", "not distributed and not devices")
    assert run.outcomes() == {"test_plain": "PASSED"}
    assert "1 benchmarked" in run.text
