"""Tests of pytest-memray: memory of marked tests, measured in ranks."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.features.plugins.conftest import Pair
    from tests.run import Run

_WORKERS: tuple[tuple[str, ...], ...] = ((), ("-n1",))
"""Options of the sessions of a marked suite, which are compared with one session of the plain suite."""


# pytest-monitor


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


# pytest-durations


# pytest-harvest


# pytest-codspeed
