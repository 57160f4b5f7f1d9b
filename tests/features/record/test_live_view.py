"""Tests of what a session shows while it runs: the report on a signal."""

from __future__ import annotations

import re
import signal

from tests.background_suite import BackgroundSession, BackgroundSuite, suite
from tests.deadline import TIMEOUT, Deadline
from tests.torch_release import RECORDS_COLLECTIVES

__all__ = ["suite"]

_RANKS = """
import time
from pathlib import Path

import pytest
from tests.inner import note

@pytest.mark.distributed(2)
def test_ranks(rank):
    import torch.distributed as dist

    dist.barrier()
    if rank == 1:
        note("at-ranks", "here")
        while not Path("ranks").exists():
            time.sleep(0.02)
    dist.barrier()
"""
_OTHERS = """
import pytest
from tests.inner import note, wait_for

def test_plain():
    note("at-plain", "here")
    wait_for("plain")

@pytest.mark.devices(3)
def test_three():
    note("at-three", "here")
    wait_for("three")
"""


def touch(suite: BackgroundSuite, *names: str) -> None:
    """Create the files that the tests of `suite` wait for."""
    for name in names:
        (suite.path / name).touch()


def expect_report(session: BackgroundSession, *wanted: str) -> None:
    """Send SIGUSR1 to `session` until the lines of a report match the patterns `wanted`, the headline first."""
    assert session.process.stdout is not None
    deadline, lines = Deadline(TIMEOUT), list[str]()
    # The controller may learn of starts, phases and requests later than the workers write their files.
    while len(lines) != len(wanted) or not all(map(re.fullmatch, wanted, lines)):
        assert not deadline.expired, lines
        session.process.send_signal(signal.SIGUSR1)
        # A line of pytest may be unfinished when the report begins.
        found = (re.search(r"accel: \d+ running.*", line) for line in session.process.stdout)
        first = next(match[0] for match in found if match is not None)
        number = sum(map(int, re.findall(r"(\d+) (?:running|waiting)", first)))
        lines = [first, *sorted(next(session.process.stdout).rstrip() for _ in range(number))]


def test_a_signal_shows_running_and_waiting_tests_and_the_places_of_ranks(suite: BackgroundSuite) -> None:
    suite.write("test_a.py", _RANKS)
    suite.write("test_b.py", _OTHERS)
    session = suite.start("-n2", "--dist=loadfile")
    suite.read("at-ranks")
    suite.read("at-plain")
    stuck = r".*rank 1 has not reached barrier #2 \(last collective: barrier #1\)" if RECORDS_COLLECTIVES else ""
    ranks = rf"  test_a\.py::test_ranks \(gw\d, \d+ s, \w+\): .*\brank 1 at test_a\.py:\d+ in test_ranks;{stuck}.*"
    plain = r"  test_b\.py::test_plain \(gw\d, \d+ s, call\)"
    expect_report(session, "accel: 2 running, 0 waiting, 2 of 4 devices in use", ranks, plain)
    touch(suite, "plain")
    held = r"are held by pid \d+ \(\S+\) for test_a\.py::test_ranks since .* \(for \d+ s now\)"
    three = rf"  test_b\.py::test_three waits for 3 sim devices: .* {held}"
    expect_report(session, "accel: 1 running, 1 waiting, 2 of 4 devices in use", ranks, three)
    touch(suite, "ranks", "three")
    assert session.finish().ret == 0


_HANDLED = """
    import os
    import signal
    from pathlib import Path

    import pytest

    @pytest.mark.distributed(2, init=False)
    def test_ranks(): assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

    @pytest.mark.devices
    def test_marked(accel): pass

    def test_unhandled(): assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

    def test_handled():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert Path("handled").read_text()
    """


def test_only_the_controller_of_a_session_with_marked_tests_handles_the_signal(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write("test_it.py", _HANDLED)
    for test in ("test_ranks", "test_unhandled"):  # Deselected tests need no ranks.
        suite.run(f"test_it.py::{test}").expect({test: "PASSED"})
    suite.write(
        "conftest.py", "import faulthandler, signal\n\nfaulthandler.register(signal.SIGUSR1, open('handled', 'w'))\n"
    )
    run = suite.run("-k", "marked or test_handled")
    run.expect({"test_marked": "PASSED", "test_handled": "PASSED"})
    assert "accel: 1 running" not in run.text


def test_the_unfinished_line_of_pytest_is_repeated_below_the_report(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write("test_it.py", _OTHERS)
    session = suite.start("-k", "three")
    suite.read("at-three")
    expect_report(session, "accel: 1 running, 0 waiting, 3 of 4 devices in use", r"  test_it\.py::test_three .*")
    touch(suite, "three")
    assert session.process.stdout is not None
    text = session.process.stdout.read()
    session.process.wait()
    assert text.startswith("test_it.py::test_three PASSED"), text
