"""Helpers that run test suites in separate pytest processes and check that these leave nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from tests.deadline import Deadline, eventually
from tests.run import OUTER_VARIABLES, Run, read_causes
from tests.session_server import WITHOUT_TORCH

RUN_ID_VARIABLE = "ACCEL_TEST_RUN"
"""Environment variable that identifies every process of a session, also those that have left its process group."""

PYTEST = (sys.executable, "-m", "pytest")

_TIMEOUT = 300.0
"""Timeout of a session in seconds of a machine that is not busy (`Deadline`): ten times what most of them take."""


def torchrun(processes: int) -> tuple[str, ...]:
    """Return the command that runs pytest in `processes` processes of torchrun on this machine."""
    launcher = ("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}")
    return (*PYTEST[:2], *launcher, *PYTEST[1:])


class BackgroundSession:
    """A running pytest session."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self._folder = folder

    def finish(self, timeout: float = _TIMEOUT) -> Run:
        """Wait until the session ends and return its result; fail the test after `timeout` seconds."""
        deadline = Deadline(timeout)
        text = None
        while text is None and not deadline.expired:
            with contextlib.suppress(subprocess.TimeoutExpired):
                text, _ = self.process.communicate(timeout=1.0)
        if text is None:
            self.process.send_signal(signal.SIGABRT)  # Makes faulthandler write the stacks.
            text, _ = self.process.communicate()
            pytest.fail(f"the session hangs\n{text}")
        if "INTERNALERROR" in text:
            pytest.fail(text, pytrace=False)
        return Run(self.process.returncode, text, causes=read_causes(self._folder))

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """Wait for the next line of the output that has a match of `pattern`, and return the match."""
        assert self.process.stdout is not None
        output = []
        for text in self.process.stdout:
            output.append(text)
            if (match := re.search(pattern, text)) is not None:
                return match
        pytest.fail("".join(["no such line in the output:\n", *output]), pytrace=False)

    def fork_servers(self) -> list[psutil.Process]:
        """Return the fork servers that run."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "server import main" in command_line(child)]

    def fork_server(self) -> psutil.Process:
        """Wait for the fork server and return it."""
        return eventually("a fork server", self.fork_servers)[0]


def command_line(process: psutil.Process) -> str:
    """Return the command line of `process`, or an empty string if it has ended (it may be a zombie)."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def living_processes(variable: str, value: str) -> list[psutil.Process]:
    """Return all living processes in whose environment `variable` is `value`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Return whether `process` has exited, even if its parent has not been told of it yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _can_lock(path: Path) -> bool:
    """Return whether no process has locked the file `path`."""
    with path.open() as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _prepare_process(group: Path | None) -> None:
    """Prepare a new session's process: restore the default action of SIGINT and enter the control group.

    Without this, a session would ignore SIGINT if a shell had started this process as a background job.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


class BackgroundSuite:
    """A folder with tests, and the pytest sessions that run in it. They share locks only with one another."""

    def __init__(self, path: Path, temporary: Path) -> None:
        self.path = path
        self.locks = temporary / "locks"
        self.temporary = temporary
        self.control_group: Path | None = None
        """The control group in which sessions start, or None for that of this process."""
        self.run_id = uuid.uuid4().hex
        self._python_path = os.environ.get("PYTHONPATH")
        self._sessions: list[BackgroundSession] = []
        self.write("pytest.ini", "[pytest]\naccel = sim:4\nfilterwarnings = error\n")

    def write(self, name: str, text: str) -> None:
        """Write the dedented `text` to the file `name` of the suite."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def without_torch(self) -> None:
        """Have sessions run as if torch were not installed. Its import takes half the time of a session with ranks."""
        self._python_path = os.pathsep.join(filter(None, [WITHOUT_TORCH, self._python_path]))

    def start(
        self,
        *args: str,
        program: Sequence[str] = PYTEST,
        environment: Mapping[str, str] = MappingProxyType({}),
        terminal: int = subprocess.PIPE,
    ) -> BackgroundSession:
        """Start a session in its own process group, as a shell does.

        `program` is the command that runs pytest, for example one with a launcher. `terminal` is the descriptor of a
        terminal for the output; by default the output goes to a pipe.
        """
        inherited = {name: value for name, value in os.environ.items() if not OUTER_VARIABLES.match(name)}
        variables = inherited | {
            RUN_ID_VARIABLE: self.run_id,
            "PYTEST_ACCEL_LOCK_DIR": str(self.locks),
            "TMPDIR": str(self.temporary),
            "COLUMNS": "160",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **({"PYTHONPATH": self._python_path} if self._python_path else {}),
            **environment,
        }
        process = subprocess.Popen(
            [*program, "-v", "-p", "accel", "-p", "xdist", "-p", "no:cacheprovider", *args],
            cwd=self.path,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=partial(_prepare_process, self.control_group),
        )
        session = BackgroundSession(process, self.path)
        self._sessions.append(session)
        return session

    def run(self, *args: str) -> Run:
        """Run a session and return its result."""
        return self.start(*args).finish()

    def read(self, name: str) -> str:
        """Wait until a test has written the file `name`, and return its text without whitespace at both ends."""
        path = self.path / name
        eventually(f"{name} to be written", lambda: path.exists() and path.read_text().endswith("\n"))
        return path.read_text().strip()

    def processes(self) -> list[psutil.Process]:
        """Return all living processes of the suite's sessions."""
        return living_processes(RUN_ID_VARIABLE, self.run_id)

    def expect_nothing_left(self) -> None:
        """Check that the sessions left no process, private folder, held lock, or named shared memory."""
        eventually("all processes to end", lambda: not self.processes(), timeout=15)
        assert list(self.temporary.glob("accel-*")) == []
        assert [name for name in os.listdir("/dev/shm") if self.run_id in name] == []
        for path in self.locks.glob("*.lock"):
            # A process that ends loses its environment, by which it is found, before its files.
            eventually(f"{path} to be free", partial(_can_lock, path), timeout=15)

    def kill_sessions(self) -> None:
        """Kill the sessions and processes that still run, as after a failed test."""
        for session in self._sessions:
            session.process.kill()
            session.process.wait()
            if session.process.stdout is not None:
                session.process.stdout.close()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def suite(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundSuite]:
    """Provide an empty suite. The test fails if its sessions leave something behind."""
    # A socket's path must be short, so the test's name must not be part of it.
    new_suite = BackgroundSuite(tmp_path, tmp_path_factory.mktemp("s"))
    try:
        yield new_suite
        new_suite.expect_nothing_left()
    finally:
        new_suite.kill_sessions()
