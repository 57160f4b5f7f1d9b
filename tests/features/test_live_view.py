"""What a session shows while it runs: the report on a signal."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.faults.conftest import Suite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.faults.conftest import Session

_WAIT = """
import time
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def wait_for():
    def wait(name):
        Path(f"at-{name}").write_text("x\\n")
        while not Path(name).exists():
            time.sleep(0.02)

    return wait
"""
_TESTS = """
import pytest
import torch.distributed as dist


@pytest.mark.distributed(2)
def test_ranks(rank, wait_for):
    dist.barrier()
    if rank == 1:
        wait_for("ranks")
    dist.barrier()


@pytest.mark.devices(4)
def test_devices(wait_for):
    wait_for("devices")


def test_plain(wait_for):
    wait_for("plain")
"""


@pytest.fixture
def suite(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """An empty suite whose tests wait for files."""
    made = Suite(tmp_path, tmp_path_factory.mktemp("s"))
    made.write("conftest.py", _WAIT)
    try:
        yield made
        made.expect_nothing_left()
    finally:
        made.end()


def report(session: Session) -> list[str]:
    """Send the signal; return the lines of the report, and the next line."""
    session.process.send_signal(signal.SIGUSR1)
    assert session.process.stdout is not None
    for line in session.process.stdout:
        if (match := re.match(r"accel: (\d+) running tests?, (\d+) waiting", line)) is not None:
            return [line, *(next(session.process.stdout) for _ in range(int(match[1]) + int(match[2])))]
    pytest.fail("the session has ended", pytrace=False)


def test_a_signal_shows_the_running_test_and_the_places_of_its_ranks(suite: Suite) -> None:
    suite.write("test_it.py", _TESTS)
    session = suite.start()
    suite.read("at-ranks")
    first = report(session)
    (suite.path / "ranks").touch()
    suite.read("at-devices")
    second = report(session)
    (suite.path / "devices").touch()
    suite.read("at-plain")
    third = report(session)
    (suite.path / "plain").touch()
    assert session.process.stdout is not None
    rest = session.process.stdout.read()
    assert session.finish().code == 0

    assert first[0] == "accel: 1 running test, 0 waiting, 2 of 4 devices in use\n"
    assert re.match(r"  test_it\.py::test_ranks \(\d+ s, (setup|call)\): ", first[1])
    assert re.search(r"\brank 1 at conftest\.py:\d+ in wait;", first[1])
    assert "rank 1 has not reached barrier #2 (last collective: barrier #1)" in first[1]
    assert second[0] == "accel: 1 running test, 0 waiting, 4 of 4 devices in use\n"
    assert re.fullmatch(r"  test_it\.py::test_devices \(\d+ s, (setup|call)\)\n", second[1])
    assert third[0] == "accel: 1 running test, 0 waiting, 0 of 4 devices in use\n"
    assert re.fullmatch(r"  test_it\.py::test_plain \(\d+ s, call\)\n", third[1])
    # The unfinished line is repeated below the report, and pytest finishes it.
    assert re.match(r"test_it\.py::test_plain PASSED +\[100%\]\n", rest)


def test_the_report_names_workers_and_waiting_tests(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.devices(3)
        @pytest.mark.parametrize("number", range(2))
        def test_three(number, wait_for):
            wait_for("go")


        def test_plain(wait_for):
            wait_for("plain")
        """,
    )
    session = suite.start("-n3", "--dist=loadgroup", "--accel-schedule=off")
    suite.read("at-go")
    suite.read("at-plain")
    lines = report(session)
    while "1 waiting" not in lines[0]:  # The request of the other test has not arrived.
        lines = report(session)
    (suite.path / "go").touch()
    (suite.path / "plain").touch()
    run = session.finish()

    assert lines[0] == "accel: 2 running tests, 1 waiting, 3 of 4 devices in use\n"
    text = "".join(sorted(lines[1:]))
    assert re.search(r"^  test_it\.py::test_plain \(gw\d, \d+ s, call\)$", text, re.MULTILINE)
    assert re.search(r"^  test_it\.py::test_three\[(\d)\] \(gw\d, \d+ s, (setup|call)\)$", text, re.MULTILINE)
    waits = (
        r"^  test_it\.py::test_three\[(\d)\] waits for 3 sim devices: sim-0, sim-1, sim-2 are held by "
        r"pid \d+ \(\S+\) for test_it\.py::test_three\[(\d)\] since .* \(for \d+ s now\)$"
    )
    assert (match := re.search(waits, text, re.MULTILINE)) is not None
    assert match[1] != match[2]
    run.expect(dict.fromkeys(("test_three[0]", "test_three[1]", "test_plain"), "PASSED"))


_ACTIONS = """
import signal
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    Path("at_end").write_text(repr(signal.getsignal(signal.SIGUSR1)))
"""


def test_only_the_controller_of_a_session_with_marked_tests_handles_the_signal(suite: Suite) -> None:
    suite.write("conftest.py", _ACTIONS)
    suite.write(
        "test_it.py",
        """
        import signal
        import subprocess
        import sys

        import pytest


        @pytest.mark.distributed(2)
        def test_ranks():
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


        def test_programs():
            assert callable(signal.getsignal(signal.SIGUSR1))
            code = "import signal; assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL"
            subprocess.run([sys.executable, "-c", code], check=True)


        def test_unhandled():
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        """,
    )
    suite.run("-k", "not unhandled").expect(dict.fromkeys(("test_ranks", "test_programs"), "PASSED"))
    assert (suite.path / "at_end").read_text() == "<Handlers.SIG_DFL: 0>"
    # Deselected tests need no ranks.
    suite.run("test_it.py::test_unhandled").expect({"test_unhandled": "PASSED"})


@pytest.mark.parametrize("handled_by", ["signal", "faulthandler"])
def test_a_handler_of_the_suite_is_kept(suite: Suite, handled_by: str) -> None:
    register = {
        "signal": "signal.signal(signal.SIGUSR1, lambda *_: Path('handled').write_text('x'))",
        "faulthandler": "faulthandler.register(signal.SIGUSR1, open('handled', 'w'))",
    }
    suite.write("conftest.py", f"import faulthandler\n{_ACTIONS}\n\n{register[handled_by]}\n")
    suite.write(
        "test_it.py",
        """
        import os
        import signal
        from pathlib import Path

        import pytest


        @pytest.mark.devices
        def test_device():
            pass


        def test_signal():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert Path("handled").read_text()
        """,
    )
    run = suite.run()
    run.expect({"test_device": "PASSED", "test_signal": "PASSED"})
    assert "accel: 1 running test" not in run.text
