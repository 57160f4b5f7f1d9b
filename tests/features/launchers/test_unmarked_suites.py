"""Tests that suites without a mark have their outcomes with the plugin, too, in each launched process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

import pytest

from tests.background_suite import PYTEST, BackgroundSuite, torchrun
from tests.features.launchers.unmarked_suites import RECORDER, SUITES
from tests.run import Run

_OPEN_MPI = ("mpirun.openmpi", "--host", "localhost:2", "-n", "2", *PYTEST)
_TIMEOUT = 120.0
"""Seconds for one session."""
_WITH_TORCH = "autouse"
"""The only suite that imports torch."""
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_WAYS = (
    pytest.param(PYTEST, ("-n2",), 1, id="workers"),
    pytest.param(torchrun(2), (), 2, id="torchrun"),
    pytest.param(PYTEST, (), 1, id="plain"),
    pytest.param(_OPEN_MPI, (), 2, id="openmpi"),
)


@pytest.fixture
def suite(suite: BackgroundSuite) -> BackgroundSuite:
    """Return a suite whose settings name no option of the plugin."""
    suite.write("pytest.ini", "[pytest]\n")
    suite.write("recorder.py", RECORDER)
    return suite


def _run(suite: BackgroundSuite, program: tuple[str, ...], *options: str) -> tuple[dict[str, Any], Run]:
    """Run a session, or one in each process of a launcher; return what each has seen, by rank."""
    outcomes = suite.temporary / "outcomes"
    outcomes.mkdir()
    environment = {**_AS_ROOT, "OUTCOMES": str(outcomes), "PYTHONPATH": str(suite.path)}
    run = suite.start("-p", "recorder", *options, program=program, environment=environment).finish(_TIMEOUT)
    seen = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in outcomes.glob("*.json")}
    shutil.rmtree(outcomes)
    return seen, run


def _take_reports(seen: dict[str, Any], folder: str) -> list[str]:
    """Remove the reports of tests in `folder` from what a process has seen, and return their outcomes."""
    taken = [report for report in seen["reports"] if report[0].startswith(f"{folder}/")]
    seen["reports"] = [report for report in seen["reports"] if report not in taken]
    return [outcome for _, _, outcome, _ in taken]


def _failed(seen: Mapping[str, Any]) -> set[str]:
    return {nodeid.partition("/")[0] for nodeid, _, outcome, _ in seen["reports"] if outcome == "failed"}


@pytest.mark.long(except_for="torchrun")
@pytest.mark.parametrize(("program", "options", "processes"), _WAYS)
def test_the_plugin_changes_nothing_for_suites_without_a_mark(
    suite: BackgroundSuite, program: tuple[str, ...], options: tuple[str, ...], processes: int
) -> None:
    if shutil.which(program[0]) is None:
        pytest.skip(f"there is no {program[0]} here")
    for folder, files in SUITES.items():
        (suite.path / folder).mkdir()
        for name, text in files.items():
            suite.write(f"{folder}/{name}", text)
    options = (*options, "--local-rank=7")
    # The session without the plugin has no suite with torch, whose import would take half of its time.
    others = [folder for folder in SUITES if folder != _WITH_TORCH]
    expected, without = _run(suite, program, *options, *others, "-p", "no:accel")
    seen, run = _run(suite, program, *options, *others, _WITH_TORCH)
    outcomes = {rank: _take_reports(process, _WITH_TORCH) for rank, process in seen.items()}
    for process in expected.values():
        assert process["arguments"][-2:] == ["-p", "no:accel"]
        process["arguments"][-2:] = [_WITH_TORCH]
    assert seen == expected, run.text
    if "torch.distributed.run" in program:
        assert outcomes == {"0": ["passed"] * 6, "1": ["passed"] * 3 + ["failed"] + ["passed"] * 2}
    else:
        assert all(set(of_process) == {"skipped", "passed"} for of_process in outcomes.values())
    assert run.ret == without.ret
    assert seen.keys() == set(map(str, range(processes))), run.text
    assert all(process["unchanged"] for process in seen.values()), "the suite's variables are its own"
    assert "processes, each with its own session" not in run.text, "the suite does not use the plugin"
    if processes == 2:
        buggy = {"pytest_mpi_"} if "mpirun" in program[0] else {"options", "own_mark"}
        assert _failed(seen["0"]) == set()
        assert _failed(seen["1"]) == buggy, "rank 1 is a process of the suite, and has the bug"
        assert seen["1"]["status"] == 1
