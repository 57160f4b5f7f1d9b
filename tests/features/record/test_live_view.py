"""Tests of what a session shows while it runs: the report on a signal, and the status line of a terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import termios
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest

from tests.background_suite import BackgroundSession, BackgroundSuite
from tests.deadline import TIMEOUT, Deadline
from tests.torch_release import RECORDS_COLLECTIVES

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
_RANKS = """
import pytest

@pytest.mark.distributed(2)
def test_ranks(rank, wait_for):
    import torch.distributed as dist

    dist.barrier()
    if rank == 1:
        wait_for("ranks")
    dist.barrier()
"""
_OTHERS = """
import pytest

def test_plain(wait_for): wait_for("plain")

@pytest.mark.devices(3)
def test_three(wait_for): wait_for("three")
"""


@pytest.fixture
def suite(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundSuite]:
    """Provide a suite with the fixture `wait_for`, which waits for a file; check that no process is left at the end."""
    made = BackgroundSuite(tmp_path, tmp_path_factory.mktemp("s"))
    made.write("conftest.py", _WAIT)
    try:
        yield made
        made.expect_nothing_left()
    finally:
        made.kill_sessions()


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
        first = next(line for line in session.process.stdout if re.match(r"accel: \d+ running", line))
        number = sum(map(int, re.findall(r"(\d+) (?:running|waiting)", first)))
        lines = [first.rstrip(), *sorted(next(session.process.stdout).rstrip() for _ in range(number))]


def test_a_signal_shows_running_and_waiting_tests_and_the_places_of_ranks(suite: BackgroundSuite) -> None:
    suite.write("test_a.py", _RANKS)
    suite.write("test_b.py", _OTHERS)
    session = suite.start("-n2", "--dist=loadfile")
    suite.read("at-ranks")
    suite.read("at-plain")
    stuck = r".*rank 1 has not reached barrier #2 \(last collective: barrier #1\)" if RECORDS_COLLECTIVES else ""
    ranks = rf"  test_a\.py::test_ranks \(gw\d, \d+ s, \w+\): .*\brank 1 at conftest\.py:\d+ in wait;{stuck}.*"
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


_ERASE = b"\x1b[K"
"""The control sequence that erases a line. It is sent with each status line."""
_ROWS = 12
"""Rows of the screen: fewer than a session writes, so that the status line makes it scroll."""
_STATUS_AT_ONCE = """
from pytest_accel.features.record import live_hooks

live_hooks.QUIET = 0.0
live_hooks.REFRESH = 0.05
"""
_STATUS_NEVER = """
from pytest_accel.features.record import live_hooks

live_hooks.QUIET = 1e9
"""
_MANY_TESTS = """
import pytest

@pytest.mark.parametrize("number", range(30))
def test_before(number): pass

@pytest.mark.devices(3)
def test_ranks(wait_for): wait_for("go")

@pytest.mark.parametrize("text", ["x" * 150, "ümläut 漢字", "short"])
def test_plain(text, wait_for): wait_for("plain")

@pytest.mark.parametrize("number", range(3))
def test_fails(number, wait_for):
    wait_for("fails")
    assert number == 1
"""


_VARYING = re.compile(r"=+ (?=\d+ (?:failed|passed))| in \d+\.\d+s.*|0x[0-9a-f]+")
"""Text that differs between equal sessions: addresses, durations, and the `=` that fill the line of a duration."""


class Screen:
    """A session at an emulated terminal, and the contents of this terminal."""

    def __init__(self, suite: BackgroundSuite, *args: str, term: str = "xterm") -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, 80, 0, 0))
        environment = {"COLUMNS": "80", "TERM": term}
        self.session = suite.start(*args, environment=environment, terminal=theirs)
        os.close(theirs)
        self._screen = pyte.HistoryScreen(80, _ROWS, history=10_000, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)
        self.output = b""
        """All that the session has written, with control sequences."""
        self.ended = False

    @property
    def lines(self) -> list[str]:
        """The lines of the screen."""
        return [line.rstrip() for line in self._screen.display]

    def text(self) -> str:
        """Return all lines, including those that have left the screen, without the text that `_VARYING` matches."""
        above = ["".join(row[column].data for column in range(80)).rstrip() for row in self._screen.history.top]
        return _VARYING.sub("", "\n".join([*above, *self.lines]).rstrip())

    def wait_for(self, pattern: str) -> str:
        """Wait until a line of the screen matches `pattern`, and return it."""
        limit = Deadline(TIMEOUT)
        while (found := next((line for line in self.lines if re.search(pattern, line)), None)) is None:
            if limit.expired or self.ended:
                pytest.fail(f"no {pattern} in\n{self.text()}", pytrace=False)
            self._read()
        return found

    def finish(self) -> str:
        """Wait for the end of the session, and return :meth:`text`."""
        limit = Deadline(TIMEOUT)
        while not self.ended:
            assert not limit.expired, self.text()
            self._read()
        os.close(self._ours)
        self.session.process.wait()
        return self.text()

    def _read(self) -> None:
        if select.select([self._ours], [], [], 1.0)[0]:
            try:
                written = os.read(self._ours, 65536)
            except OSError:  # No process has the terminal open any more.
                self.ended = True
            else:
                self.output += written
                self._stream.feed(written)


@pytest.mark.long(except_for="dots")
@pytest.mark.parametrize(
    "args",
    [(), ("-n1", "-v", "--color=yes", "-rA", "-o", "log_cli=true")],
    ids=["dots", "verbose"],
)
def test_the_final_output_is_the_same_with_and_without_status_line(
    suite: BackgroundSuite, args: tuple[str, ...]
) -> None:
    suite.without_torch()
    suite.write("test_it.py", _MANY_TESTS)
    args = args if "-v" in args else ("-q", *args)  # The suite adds -v.
    suite.write("conftest.py", _WAIT + _STATUS_AT_ONCE)
    screen = Screen(suite, *args)
    for name, running in (("go", "3 of 4"), ("plain", "0 of 4"), ("fails", "0 of 4")):
        screen.wait_for(rf"^accel: 1 running, 0 waiting, {running} devices in use$")
        touch(suite, name)
    output = screen.finish()

    suite.write("conftest.py", _WAIT + _STATUS_NEVER)
    assert output == Screen(suite, *args).finish()
    assert " running, " not in output
    assert _ERASE in screen.output
    assert "2 failed, 35 passed" in output


@pytest.mark.parametrize(("args", "term"), [(("-s",), "xterm"), (("--no-header", "-n1"), "")])
def test_some_sessions_have_no_status_line(suite: BackgroundSuite, args: tuple[str, ...], term: str) -> None:
    suite.without_torch()
    suite.write("conftest.py", _WAIT + _STATUS_AT_ONCE)
    suite.write("test_it.py", _OTHERS)
    screen = Screen(suite, "-k", "three", *args, term=term)
    suite.read("at-three")
    # The report is written by the thread that would have written the status line.
    screen.session.process.send_signal(signal.SIGUSR1)
    screen.wait_for("^accel: 1 running")
    touch(suite, "three")
    assert screen.finish().count("accel: ") == 1 + ("sim, 4 devices" in screen.text())
    # The unfinished line is repeated below the report, and pytest finishes it.
    assert ("test_it.py::test_three PASSED" in screen.text()) is ("-s" in args)
    assert _ERASE not in screen.output
