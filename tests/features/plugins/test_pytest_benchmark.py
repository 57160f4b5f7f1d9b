"""Tests of pytest-benchmark: statistics of marked tests in tables and files, and equal rounds on all ranks."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.features.conftest import Suite
from tests.features.plugins.conftest import Pair, needs
from tests.run import Run

pytestmark = needs("pytest_benchmark")

_QUICK = ("--benchmark-max-time=0.01", "--benchmark-min-rounds=3", "-p", "no:cacheprovider")
_SUITE = """
    import pytest

    def work(n=50): return sum(range(n))

    def test_plain(benchmark): assert benchmark(work) == 1225

    @pytest.mark.distributed(2)
    def test_ranks(benchmark):
        benchmark.extra_info["of"] = "ranks", 2
        assert benchmark(work) == 1225

    @pytest.mark.distributed(2)
    @pytest.mark.parametrize("n", [3, 4])
    @pytest.mark.benchmark(group="sums", max_time=0.02)
    def test_group(benchmark, n): benchmark.pedantic(work, args=(n,), rounds=n, iterations=2)

    @pytest.mark.distributed(2)
    def test_fails(benchmark):
        def fail(): raise ValueError("on purpose")
        benchmark(fail)

    @pytest.mark.devices(1)
    def test_device(benchmark): benchmark(work)
    """
_RANKS = """
    import pytest

    CALLS = []

    def reduce():
        import torch
        import torch.distributed as dist

        ones = torch.ones(2)
        dist.all_reduce(ones)
        CALLS.append(ones[0].item())
        return ones[0].item()

    @pytest.mark.distributed(2)
    def test_reduce(benchmark):
        assert benchmark(reduce) == 2
        print("calls", len(CALLS))

    @pytest.mark.distributed(2)
    def test_last_rank_alone(benchmark, rank):
        if rank == 1:
            benchmark(sum, range(10))

    @pytest.mark.distributed(2)
    def test_last_rank_fails(benchmark, rank):
        def run(): assert rank == 0
        benchmark(run)
    """


def read_benchmarks(suite: Suite) -> dict[str, Any]:
    """Return the entries of ``out.json`` by test, without times and the values of single ranks."""
    found = {}
    for entry in json.loads((suite.path / "out.json").read_text())["benchmarks"]:
        fixed_rounds = entry["stats"]["rounds"] if entry["group"] else None
        fields = {key: entry[key] for key in ("name", "group", "param", "params", "extra_info", "options")}
        found[entry["fullname"]] = fields, sorted(entry["stats"]), fixed_rounds
    return found


def parse_tables(run: Run) -> tuple[list[str], list[str]]:
    """Return the headlines of the tables that a session shows, and the tests in them."""
    headlines = re.findall(r"^-+ (benchmark.*: \d+ tests) -+$", run.text, re.MULTILINE)
    tests = re.findall(r"^(test_\w+(?:\[\d\])?(?: \(\w+\))?) +[\d.,]+ \(", run.text, re.MULTILINE)
    return headlines, sorted(tests)


def test_statistics_of_marked_tests_are_in_tables_and_files(pair: Pair) -> None:
    pair.plugin("benchmark")
    pair.write("test_x.py", _SUITE)
    runs = [one.run(*_QUICK, "--benchmark-json=out.json") for one in (pair.plain, pair.marked)]
    assert runs[1].outcomes() == runs[0].outcomes()
    assert parse_tables(runs[1]) == parse_tables(runs[0])
    assert parse_tables(runs[1])[0] == ["benchmark: 3 tests", "benchmark 'sums': 2 tests"]
    assert read_benchmarks(pair.marked) == read_benchmarks(pair.plain)


def test_all_ranks_run_the_least_number_of_rounds_and_workers_of_xdist_measure_nothing(suite: Suite) -> None:
    suite.plugin("benchmark")
    suite.write("test_x.py", _RANKS)
    options = (*_QUICK, "--benchmark-json=out.json", "--benchmark-warmup=on", "-W", "ignore", "-rP")
    run = suite.run(*options)
    outcomes = {"test_reduce": "PASSED", "test_last_rank_alone": "PASSED"}
    assert run.outcomes() == {**outcomes, "test_last_rank_fails": "FAILED"}
    assert re.search(r"rank 1: failed at test_x.py:\d+$", run.failure("test_last_rank_fails"), re.MULTILINE)
    # Both ranks print the same. pytest-benchmark calls the function once more, for its result.
    assert re.findall(r"^calls \d+$", run.text, re.MULTILINE) == ["calls 4"]
    found = {
        one["name"]: one["stats"]["rounds"] for one in json.loads((suite.path / "out.json").read_text())["benchmarks"]
    }
    assert found == {"test_reduce": 3}
    distributed = suite.run(*options, "-n1")
    assert re.findall(r"^calls \d+$", distributed.text, re.MULTILINE) == ["calls 1"]
    assert parse_tables(distributed) == ([], [])
