"""Fixtures and helpers for the tests of launchers: a suite for sessions under one, and a choice of the MPI."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_accel.features.launch.launch_commands import missing
from tests.background_suite import BackgroundSession, BackgroundSuite
from tests.run import OUTER_VARIABLES, Run

RANKS = """
    import os
    import signal
    import sys

    import pytest


    @pytest.mark.distributed(2)
    def test_both(rank, world_size):
        import torch
        import torch.distributed as dist

        values = torch.full((2,), rank + 1.0)
        dist.all_reduce(values)
        assert values.tolist() == [3.0, 3.0]
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], world_size) == (str(rank), "2", 2)


    @pytest.mark.distributed(2)
    def test_ctrl_c_is_handled_as_in_any_rank(gather):
        assert gather(signal.getsignal(signal.SIGINT) is signal.default_int_handler) == [True, True]


    @pytest.mark.distributed(1)
    def test_fewer(rank, world_size):
        assert (rank, world_size) == (0, 1)


    @pytest.mark.distributed(4)
    def test_more():
        pass


    @pytest.mark.distributed(1, launcher="mpirun")
    def test_of_an_mpi_job():
        pass


    @pytest.mark.devices(2)
    def test_devices(devices):
        assert len(devices) == 2


    def test_plain():
        assert not {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"} & os.environ.keys()
        assert "zmq" not in sys.modules  # One machine does not need it.
"""
ENDLESS = """
    import threading
    from pathlib import Path

    import pytest


    @pytest.mark.distributed(2, nodes={nodes})
    def test_endless(rank):
        Path(__file__).with_name(f"rank-{{rank}}").write_text("here\\n")
        threading.Event().wait()


    def test_next():
        pass
"""
PASSES = {
    "test_both": "PASSED",
    "test_ctrl_c_is_handled_as_in_any_rank": "PASSED",
    "test_fewer": "PASSED",
    "test_more": "SKIPPED",
    "test_of_an_mpi_job": "SKIPPED",
    "test_devices": "PASSED",
    "test_plain": "PASSED",
}
"""The results of the tests in `RANKS`, with two launched processes."""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of an outer session from the environment."""
    for name in os.environ:
        if OUTER_VARIABLES.match(name):
            monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Provide a function that writes a script with the given text and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "trainer.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def use_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Provide a function that makes ``mpirun`` that of ``openmpi`` or ``mpich``, as Debian names them.

    It skips the test if this MPI is not installed.
    """

    def use(flavour: str) -> None:
        folder = tmp_path / flavour
        folder.mkdir()
        found = [Path(place, f"mpirun.{flavour}") for place in os.get_exec_path()]
        programs = [path for path in found if path.exists()]
        if not programs:
            reason = missing("mpirun") or f"there is no mpirun.{flavour}"
            pytest.skip(reason)
        wrapper = folder / "mpirun"
        wrapper.write_text(f'#!/bin/sh\nexec {programs[0]} "$@"\n')
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    return use


@pytest.fixture
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundSuite]:
    """Yield an empty suite, whose path is short enough for sockets, and in which launched processes are one session.

    The test fails if a session leaves processes or files behind.
    """
    made = BackgroundSuite(tmp_path_factory.mktemp("t"), tmp_path_factory.mktemp("s"))
    made.write("pytest.ini", "[pytest]\naccel = sim:4\naccel_launcher = on\nfilterwarnings = error\n")
    try:
        yield made
        made.expect_nothing_left()
        prefix = hashlib.sha256(os.fsencode(made.locks)).hexdigest()[:8]
        assert list(Path("/tmp", f"pytest-accel-{os.geteuid()}").glob(f"{prefix}-*")) == []
    finally:
        made.kill_sessions()


def expect_one_session(suite: BackgroundSuite, run: Run, launcher: str) -> None:
    """Check that the suite `RANKS` has run in one session, which has reported everything once."""
    run.expect(PASSES)
    assert run.text.count("test session starts") == 1
    assert f"accel: {launcher}, 2 ranks\n" in run.text
    assert f"needs 4 ranks; {launcher} has started 2" in run.text
    assert run.text.count("5 passed, 2 skipped") == 1
    assert run.text.count("1 test without a mark ran once, not in 2 processes") == 1
    assert run.ret == 0
    cases = ElementTree.parse(suite.path / "report.xml").getroot().iter("testcase")
    assert sorted(str(case.get("name")) for case in cases) == sorted(PASSES)


def launched_process(suite: BackgroundSuite, variable: str, value: str) -> psutil.Process:
    """Return the launched process in whose environment `variable` is `value`."""

    def has_value(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # It has ended.
            return process.environ().get(variable) == value
        return False

    (found,) = filter(has_value, suite.processes())
    return found


def start_endless(suite: BackgroundSuite, nodes: int, **how: Any) -> BackgroundSession:
    """Start a session of the suite `ENDLESS`, wait until both ranks are in the test, and return the session."""
    suite.write("test_it.py", ENDLESS.format(nodes=nodes))
    session = suite.start(**how)
    suite.read("rank-0")
    suite.read("rank-1")
    return session
