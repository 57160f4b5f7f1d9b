"""Helpers that run small test suites in separate pytest processes, and read the results of their tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from tests.deadline import Deadline
from tests.run import OUTER_VARIABLES, Run, read_causes
from tests.session_server import WITHOUT_TORCH, ForkedSession, SessionServer

if TYPE_CHECKING:
    from tests.conftest import Surroundings

_TIMEOUT = 150.0
"""Timeout of a session in seconds of a machine that is not busy (`Deadline`): more than ten times what any takes."""
_INI = """
[pytest]
accel = sim:4
filterwarnings = error
"""


class Suite:
    """A test suite in a folder of its own, and the options of the sessions that run it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        server: SessionServer,
        path: Path | None = None,
        ini: str = _INI,
        options: tuple[str, ...] = ("-p", "accel", "-p", "xdist"),
    ) -> None:
        """Make a suite in `path` (None: the working directory). Its sessions get `options` and the ini file `ini`."""
        self.path = path or Path.cwd()
        self._start = path
        """Working directory of the sessions; None: that of the test."""
        self._sessions = 0
        self._module_path: list[str] = []
        self._monkeypatch = monkeypatch
        self._server: SessionServer | None = server
        self._ini = ini
        self._options = options

    def all_plugins(self) -> None:
        """Have sessions load every installed plugin but pytest-randomly. By default they load none: it takes long."""
        self._monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        self._options = ("-p", "no:randomly")
        if importlib.util.find_spec("pytest_asyncio") is not None:
            self.ini("asyncio_default_fixture_loop_scope = function")

    def new_interpreters(self) -> None:
        """Have each session start an interpreter, which has imported no module before."""
        self._server = None

    def without_torch(self) -> None:
        """Have sessions run as if torch were not installed. Its import takes half the time of a session with ranks."""
        self._module_path = [WITHOUT_TORCH]

    def plugin(self, name: str) -> None:
        """Have sessions also load the plugin `name`."""
        self._options += ("-p", name)

    def ini(self, text: str) -> None:
        """Add lines to the ini file."""
        self._ini += textwrap.dedent(text).strip("\n") + "\n"

    def write(self, name: str, text: str) -> Path:
        """Write the dedented `text` to the file `name`, and return its path."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def read(self, name: str) -> list[str]:
        """Return the lines of a file that tests have written; an empty list if there is no such file."""
        path = self.path / name
        return path.read_text().splitlines() if path.exists() else []

    def run(self, *args: str, quiet: bool = False) -> Run:
        """Run a session to its end and return its results; `quiet` leaves out ``-v``."""
        (self.path / "pytest.ini").write_text(self._ini)
        options = self._options if quiet else (*self._options, "-v")
        ret, text, errors = self._finish([*options, *args])
        assert "INTERNALERROR" not in text
        return Run(ret, text, errors, read_causes(self.path))

    def _finish(self, args: list[str]) -> tuple[int, str, str]:
        """Run a session and return its exit status, stdout and stderr; fail the test if it hangs."""
        self._sessions += 1
        args = [f"--basetemp={self.path / f'runpytest-{self._sessions}'}", *args]
        deadline = Deadline(_TIMEOUT)
        status = None
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = self._start_process(args, output, errors)
            while status is None and not deadline.expired:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(1.0)
            if status is None:
                process.kill()
                process.wait()
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read())
        print(shlex.join(["pytest", *args]), *texts, sep="\n")
        assert status is not None, "the session hangs"
        return status, texts[0], texts[1]

    def _start_process(
        self, args: list[str], output: IO[str], errors: IO[str]
    ) -> ForkedSession | subprocess.Popen[bytes]:
        """Start a session that writes to the files `output` and `errors`."""
        folder, test_folder = self._start or Path.cwd(), os.getcwd()
        path = [*self._module_path, test_folder]
        given = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, given] if given else path)}
        if self._server is not None and self._server.can_start(os.environ):
            return self._server.start(args, folder, path, environment, output, errors)
        command = [sys.executable, "-m", "pytest", *args]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=folder, env=environment
        )


@pytest.fixture(scope="session")
def session_server(surroundings: Surroundings) -> Iterator[SessionServer]:
    """Provide the process from which the sessions of suites are forked."""
    server = SessionServer({**os.environ, **surroundings.environment})
    yield server
    server.close()


@pytest.fixture
def suite(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, session_server: SessionServer, tmp_path: Path
) -> Suite:
    """Return an empty suite in pytester's folder.

    Its sessions have their own lock folder and load no installed plugins by default.
    """
    for name in os.environ:
        if OUTER_VARIABLES.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return Suite(monkeypatch, session_server)
