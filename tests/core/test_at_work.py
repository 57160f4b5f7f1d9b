"""Tests of the functions that tell whether a process is computing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from pytest_accel.core.at_work import held_up, is_at_work
from tests.deadline import eventually
from tests.starvation import starved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the scheduler's figures of Linux")


@pytest.fixture(params=["spins", "waits"])
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that needs a processor all the time, or never."""
    end = "while True: pass" if request.param == "spins" else "input()"
    code = f"print(flush=True)\n{end}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


@pytest.mark.parametrize("process", ["spins"], indirect=True)
def test_a_process_that_gets_no_processor_is_held_up(process: subprocess.Popen[bytes]) -> None:
    with starved(process.pid):
        assert is_at_work(process.pid)
        assert held_up([process.pid]) == {process.pid}


@pytest.mark.parametrize("process", ["waits"], indirect=True)
def test_a_process_that_needs_no_processor_is_not_held_up(process: subprocess.Popen[bytes]) -> None:
    eventually("the process to wait", lambda: not is_at_work(process.pid))
    with starved(process.pid):
        assert held_up([process.pid]) == set()


def test_a_process_that_has_ended_is_not_held_up(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert held_up([process.pid]) == set()
