"""Tests of ``--accel-log``: the steps of all processes of a session in one file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.background_suite import BackgroundSuite, suite

__all__ = ["suite"]

pytestmark = pytest.mark.usefixtures("without_torch")

_TESTS = """
    import pytest


    @pytest.mark.distributed(2, kind="cpu", init=False)
    def test_ranks():
        pass


    def test_unmarked():
        pass
"""
_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} \S+ (?P<pid>\d+) (?P<role>[^:]+): (?P<step>.*)")


def steps_by_role(path: Path) -> dict[str, list[str]]:
    """Return the steps in the file, in their order, by the role of their process."""
    steps: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        match = _LINE.fullmatch(line)
        assert match is not None, line
        steps.setdefault(match["role"], []).append(match["step"])
    return steps


def in_order(steps: list[str], *beginnings: str) -> bool:
    """Return whether `steps` contain a step with each of the `beginnings`, in this order."""
    remaining = iter(steps)
    return all(any(step.startswith(beginning) for step in remaining) for beginning in beginnings)


def test_the_log_has_the_steps_of_workers_fork_servers_and_ranks(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", _TESTS)
    suite.write("steps.log", "09:00:00.000 an older file")
    run = suite.run("-n1", "--accel-log=steps.log")
    run.expect({"test_ranks": "PASSED", "test_unmarked": "PASSED"})

    steps = steps_by_role(suite.path / "steps.log")
    assert in_order(steps["main process"], "pytest starts: ", "WorldRequested: ", "WorldStarting: ", "WorldReturned: ")
    assert in_order(steps["gw0"], "pytest starts: ", "test_it.py::test_ranks: requests a world: ")
    (begins,) = (step for step in steps["gw0"] if step.startswith("test_it.py::test_ranks: begins in "))
    for rank in range(2):
        forked = f"rank {rank} of {begins.rpartition(' in ')[2]}"
        joined = "has reached the store of its world"
        assert in_order(steps[forked], "starts; its parent is process ", joined, "its pytest session has")
        assert in_order(steps["fork server 0"], "starts; its parent is process ", f"{forked} is process ")


def test_a_log_that_cannot_be_opened_is_a_usage_error(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", _TESTS)
    run = suite.run("--accel-log=absent/steps.log")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    path = suite.path / "absent" / "steps.log"
    assert f"--accel-log {path}: cannot be opened: No such file or directory" in run.text
