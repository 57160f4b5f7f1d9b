"""Sessions of misbehaving tests, each a process of its own. Nothing of them may be left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import psutil
import pytest

from tests.deadline import Deadline

TIMEOUT = 60.0
"""Seconds of a machine that is not busy (`Deadline`) after which what is waited for counts as never coming."""
MARKER = "ACCEL_TEST_RUN"
"""The environment variable by which every process of a session is known, however it has come away from it."""

_WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_LINES = (
    re.compile(rf"^(?P<test>\S+::\S+) (?P<word>{_WORDS})\b", re.MULTILINE),
    re.compile(rf"^\[gw\d+\] (?:\[ *\d+%\] )?(?P<word>{_WORDS}) (?P<test>\S+::\S+)", re.MULTILINE),
)
_OUTER = re.compile(
    r"PYTEST_(?!DEBUG_TEMPROOT)|COV_CORE|\w+_VISIBLE_DEVICES$|(LOCAL_)?RANK$|WORLD_SIZE$|OMP_NUM_THREADS$"
)
"""Variables that an outer session or launcher may have set."""

PYTEST = (sys.executable, "-m", "pytest")

Value = TypeVar("Value")


def eventually(what: str, look: Callable[[], Value], timeout: float = TIMEOUT) -> Value:
    """The first true answer of `look`; fails if there is none in time."""
    limit = Deadline(timeout)
    while not (found := look()):
        assert not limit.expired, f"waited {timeout:g} s for {what}, and longer where the machine is busy"
        time.sleep(0.02)
    return found


@dataclass(frozen=True)
class Run:
    """A session that has ended."""

    code: int
    text: str

    @property
    def words(self) -> dict[str, str]:
        """The result that ``-v`` has shown for each test, by the test's name."""
        words: dict[str, str] = {}
        for pattern in _LINES:
            for match in pattern.finditer(self.text):
                name = match["test"].rpartition("::")[2]
                words[name] = f"{words[name]} {match['word']}" if name in words else match["word"]
        return words

    def failure(self, test: str) -> str:
        """Everything that is said of `test` under headlines with its name."""
        headline = rf"^_+ (?:ERROR at \w+ of )?{re.escape(test)} _+$\n(.*?)(?=^(?:__+ \S.* __+|=+ .* =+)$)"
        found = re.findall(headline, self.text, re.MULTILINE | re.DOTALL)
        assert found, f"no failure of {test} in\n{self.text}"
        return "\n".join(found)

    def expect(self, expected: dict[str, str]) -> None:
        """Every test has got its word, or the assertion shows the whole text."""
        wrong = {
            name: self.words.get(name) for name in expected | self.words if self.words.get(name) != expected.get(name)
        }
        if wrong:
            pytest.fail(f"{self.text}\n{wrong}", pytrace=False)


class Session:
    """A pytest session that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def finish(self, timeout: float = TIMEOUT) -> Run:
        """Wait for its end."""
        limit = Deadline(timeout)
        text = None
        while text is None and not limit.expired:
            with contextlib.suppress(subprocess.TimeoutExpired):
                text, _ = self.process.communicate(timeout=1.0)
        if text is None:
            self.process.send_signal(signal.SIGABRT)  # faulthandler shows where it hangs.
            text, _ = self.process.communicate()
            pytest.fail(f"the session hangs\n{text}")
        if "INTERNALERROR" in text:
            pytest.fail(text, pytrace=False)
        return Run(self.process.returncode, text)

    def fork_server(self) -> psutil.Process:
        """The fork server, waited for."""
        return eventually("a fork server", lambda: _fork_servers(psutil.Process(self.process.pid)))[0]

    def preloaded_fork_server(self) -> psutil.Process:
        """Its copy that has imported more, from which the ranks come."""
        return eventually("a preloaded fork server", lambda: _fork_servers(self.fork_server()))[0]


def _fork_servers(parent: psutil.Process) -> list[psutil.Process]:
    return [child for child in parent.children() if "forkserver.server import main" in " ".join(child.cmdline())]


def _begin(group: Path | None) -> None:
    """A shell starts its background jobs with SIGINT ignored, and so are all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


class Suite:
    """A folder with tests, and pytest sessions in it that share their locks with no other."""

    def __init__(self, path: Path, temporary: Path) -> None:
        self.path = path
        self.locks = temporary / "locks"
        self.temporary = temporary
        self.control_group: Path | None = None
        """The control group that sessions begin in; None: this process's."""
        self.run_id = uuid.uuid4().hex
        self._sessions: list[Session] = []
        self.write("pytest.ini", "[pytest]\naccel = sim:4\nfilterwarnings = error\n")

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(textwrap.dedent(text))

    def start(
        self,
        *args: str,
        program: Sequence[str] = PYTEST,
        environment: Mapping[str, str] = MappingProxyType({}),
        terminal: int = subprocess.PIPE,
    ) -> Session:
        """Begin a session, in a process group of its own, as a shell would; `program` may be a launcher's.

        `terminal` is the descriptor of a terminal for its output, which is a pipe otherwise.
        """
        inherited = {name: value for name, value in os.environ.items() if not _OUTER.match(name)}
        given = inherited | {
            MARKER: self.run_id,
            "PYTEST_ACCEL_LOCK_DIR": str(self.locks),
            "TMPDIR": str(self.temporary),
            "COLUMNS": "160",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **environment,
        }
        process = subprocess.Popen(
            [
                *program,
                "-v",
                *("-p", "accel", "-p", "xdist", "-p", "no:cacheprovider"),
                *args,
            ],
            cwd=self.path,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=partial(_begin, self.control_group),
        )
        session = Session(process)
        self._sessions.append(session)
        return session

    def run(self, *args: str) -> Run:
        """A session from its beginning to its end."""
        return self.start(*args).finish()

    def read(self, name: str) -> str:
        """Wait until a test has written the file `name`, and return its text without whitespace at both ends."""
        path = self.path / name
        eventually(f"{name} to be written", lambda: path.exists() and path.read_text().endswith("\n"))
        return path.read_text().strip()

    def appears(self, pattern: str) -> None:
        """Wait for a file below the suite's temporary directory."""
        eventually(pattern, lambda: list(self.temporary.glob(pattern)))

    def processes(self) -> list[psutil.Process]:
        """Every living process of any session of this suite."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARKER) == self.run_id and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def expect_nothing_left(self) -> None:
        """No process, private folder, held lock, or named shared memory of the suite's sessions."""
        eventually(
            "all processes to end",
            lambda: not self.processes(),
            timeout=15,
        )
        assert list(self.temporary.glob("accel-*")) == []
        assert [name for name in os.listdir("/dev/shm") if self.run_id in name] == []
        for path in self.locks.glob("*.lock"):
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def end(self) -> None:
        """Kill the sessions that still run after a test of this project has failed."""
        for session in self._sessions:
            session.process.kill()
            session.process.wait()
            if session.process.stdout is not None:
                session.process.stdout.close()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def suite(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """An empty suite. What its sessions leave behind fails the test."""
    # A socket's path is short, and the names of tests are long.
    made = Suite(tmp_path, tmp_path_factory.mktemp("s"))
    try:
        yield made
        made.expect_nothing_left()
    finally:
        made.end()
