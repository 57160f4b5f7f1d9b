"""Tests that suites without a mark have their outcomes with the plugin, too, in each launched process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

import pytest

from tests.background_suite import PYTEST, BackgroundSuite, torchrun
from tests.run import Run

_OPEN_MPI = ("mpirun.openmpi", "--host", "localhost:2", "-n", "2", *PYTEST)
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_WAYS = (
    pytest.param(PYTEST, ("-n2",), 1, id="workers"),
    pytest.param(torchrun(2), (), 2, id="torchrun"),
    pytest.param(PYTEST, (), 1, id="plain"),
    pytest.param(_OPEN_MPI, (), 2, id="openmpi"),
)
_RECORDER = '''
"""Writes, in each process that a launcher has started, what its session has seen, and waits for the other processes.

A launcher kills the others as soon as one process has failed.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest

RANK, SIZE = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
rank, size = (next((os.environ[name] for name in names if name in os.environ), None) for names in (RANK, SIZE))
folder = Path(os.environ["OUTCOMES"])
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM)
PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI", "MPI_", "MASTER_", "PYTEST_ACCEL")


def variables():
    names = [name for name in os.environ if name.startswith(PREFIXES) or "RANK" in name or "WORLD" in name]
    return {name: os.environ[name] for name in names}


before = variables()


class Recorder:
    def __init__(self):
        self.reports = []

    def pytest_runtest_logreport(self, report):
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        self.reports.append([report.nodeid, report.when, report.outcome, reason])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session):
        result = yield
        seen = {
            "reports": sorted(self.reports),
            "status": int(session.exitstatus),
            "unchanged": variables() == before,
            "signals": [getattr(signal.getsignal(one), "__name__", "default") for one in SIGNALS],
            "variables": sorted(before),
        }
        path = folder / f"{rank or 0}.json"
        path.with_suffix(".part").write_text(json.dumps(seen))
        path.with_suffix(".part").rename(path)
        deadline = time.monotonic() + 300
        while len(list(folder.glob("*.json"))) < int(size or 1) and time.monotonic() < deadline:
            time.sleep(0.02)
        return result


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
'''
"""The module `recorder`, which a session loads with ``-p recorder``."""

_OWN_MARK = {
    "conftest.py": """
        import os

        import pytest


        def pytest_configure(config):
            config.addinivalue_line("markers", "distributed(world_size): needs this number of processes")


        def pytest_runtest_setup(item):
            mark = item.get_closest_marker("distributed")
            if mark is not None and int(os.environ.get("WORLD_SIZE", "1")) < mark.args[0]:
                pytest.skip(f"needs {mark.args[0]} processes")
    """,
    "test_own_mark.py": """
        import os

        import pytest


        @pytest.mark.distributed(2)
        def test_two():
            assert int(os.environ["WORLD_SIZE"]) == 2


        @pytest.mark.distributed(2)
        def test_two_on_rank_0():
            assert os.environ["RANK"] == "0"


        @pytest.mark.distributed(4)
        def test_four():
            pass
    """,
}
_OPTIONS = {
    "conftest.py": """
        import os

        import pytest


        def pytest_addoption(parser):
            parser.addoption("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
            parser.addoption("--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))


        @pytest.fixture
        def world_size(request):
            return request.config.getoption("--world-size")


        @pytest.fixture
        def rank(request):
            return request.config.getoption("--local-rank")
    """,
    "test_options.py": """
        import os


        def test_world_size(world_size):
            assert world_size == int(os.environ.get("WORLD_SIZE", "1"))


        def test_local_rank(rank):
            assert rank == 7


        def test_rank_1_has_a_bug():
            assert "1" not in map(os.environ.get, ("RANK", "OMPI_COMM_WORLD_RANK"))
    """,
}
_SUITES = {"options": _OPTIONS, "own_mark": _OWN_MARK}
"""The files of each suite, by the name of its folder: in the styles of public projects, with a bug on rank 1."""


@pytest.fixture
def suite(suite: BackgroundSuite) -> BackgroundSuite:
    """Return a suite whose settings name no option of the plugin."""
    suite.write("pytest.ini", "[pytest]\n")
    suite.write("recorder.py", _RECORDER)
    return suite


def _run(suite: BackgroundSuite, program: tuple[str, ...], *options: str) -> tuple[dict[str, Any], Run]:
    """Run a session, or one in each process of a launcher; return what each has seen, by rank."""
    outcomes = suite.temporary / "outcomes"
    outcomes.mkdir()
    environment = {**_AS_ROOT, "OUTCOMES": str(outcomes), "PYTHONPATH": str(suite.path)}
    run = suite.start("-p", "recorder", *options, program=program, environment=environment).finish()
    seen = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in outcomes.glob("*.json")}
    shutil.rmtree(outcomes)
    return seen, run


def _failed(seen: Mapping[str, Any]) -> set[str]:
    return {nodeid.partition("/")[0] for nodeid, _, outcome, _ in seen["reports"] if outcome == "failed"}


@pytest.mark.long(except_for="torchrun")
@pytest.mark.parametrize(("program", "options", "processes"), _WAYS)
def test_the_plugin_changes_nothing_for_suites_without_a_mark(
    suite: BackgroundSuite, program: tuple[str, ...], options: tuple[str, ...], processes: int
) -> None:
    if shutil.which(program[0]) is None:
        pytest.skip(f"there is no {program[0]} here")
    for folder, files in _SUITES.items():
        (suite.path / folder).mkdir()
        for name, text in files.items():
            suite.write(f"{folder}/{name}", text)
    options = (*options, "--local-rank=7", *_SUITES)  # Only conftests of named folders can have options.
    expected, without = _run(suite, program, *options, "-p", "no:accel")
    seen, run = _run(suite, program, *options)
    assert seen == expected, run.text
    assert run.ret == without.ret
    assert seen.keys() == set(map(str, range(processes))), run.text
    assert all(process["unchanged"] for process in seen.values()), "the suite's variables are its own"
    assert "processes, each with its own session" not in run.text, "the suite does not use the plugin"
    if processes == 2:
        buggy = {"options"} if "mpirun" in program[0] else {"options", "own_mark"}
        assert _failed(seen["0"]) == set()
        assert _failed(seen["1"]) == buggy, "rank 1 is a process of the suite, and has the bug"
        assert seen["1"]["status"] == 1
