"""Tests of the summary of skips that a run of this project's own tests ends with (`conftest.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

_TESTS = """
import pytest


@pytest.mark.long
@pytest.mark.parametrize("n", range(2))
def test_long(n): pass


@pytest.mark.devices(9)
def test_gpu(): pass


def test_package(): pytest.importorskip("no_such_package")


def test_program(): pytest.skip("there is no mpirun.openmpi here")


@pytest.mark.skipif(True, reason="reads /proc")
def test_system(): pass
"""


def test_the_summary_counts_the_skips_of_all_workers_by_what_they_need(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(_TESTS)
    options = ("-p", "xdist", "-p", "accel", "-n2", "--accel=sim:1")
    lines = pytester.runpytest_subprocess(*options).outlines
    at = next(at for at, line in enumerate(lines) if "skipped tests" in line)
    assert [line.split()[:3] for line in lines[at + 1 : at + 6]] == [
        ["2", "take", "long:"],
        ["1", "need", "packages"],
        ["1", "need", "a"],
        ["1", "need", "programs,"],
        ["1", "need", "another"],
    ]
