"""Helpers that run small test suites in separate pytest processes, and read the results of their tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from tests.deadline import Deadline
from tests.session_server import ForkedSession, SessionServer

if TYPE_CHECKING:
    from tests.conftest import Surroundings

_RESULTS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|RERUN|SUBPASSED|SUBFAILED|SUBSKIPPED"
_RESULT_LINES = (
    re.compile(rf"^(?P<test>\S+::.+?) (?P<word>{_RESULTS})\b", re.MULTILINE),
    re.compile(rf"^\[gw\d+\] (?:\[ *\d+%\] )?(?P<word>{_RESULTS}) (?P<test>\S+::.+?)(?: <- .*| \(.*)?$", re.MULTILINE),
)
_TIMEOUT = 150.0
"""Timeout of a session in seconds of a machine that is not busy (`Deadline`): more than ten times what any takes."""
_INI = """
[pytest]
accel = sim:4
filterwarnings = error
"""
_OUTER_VARIABLES = re.compile(
    "PYTEST_(?!DEBUG_TEMPROOT)|COV_CORE|COVERAGE_|[A-Z]+_VISIBLE_DEVICES$|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_[A-Z]+|OMP_NUM_THREADS)$"
)
"""Environment variables that an outer session or launcher may have set. Sessions do not inherit them."""


@dataclass(frozen=True)
class Run:
    """The exit status, the output and the results of a session that has ended."""

    ret: int
    text: str
    errors: str
    results: dict[str, list[str]]
    """The results that ``-v`` has shown for each test id, in order of time."""

    def result(self, test: str) -> str:
        """Return the results of `test`, joined by spaces. `test` is a test id, or its part after a ``::``."""
        found = [words for name, words in self.results.items() if name == test or name.endswith(f"::{test}")]
        assert len(found) == 1, f"{test}: expected one test of this name, found {len(found)} in\n{self.text}"
        return " ".join(found[0])

    def outcomes(self) -> dict[str, str]:
        """Return the results of each test, joined by spaces, by the part of its id after the last ``::``."""
        return {name.rpartition("::")[2]: " ".join(words) for name, words in self.results.items()}

    def count(self) -> dict[str, int]:
        """Return the number of results by result word."""
        counts: dict[str, int] = {}
        for words in self.results.values():
            for word in words:
                counts[word] = counts.get(word, 0) + 1
        return counts

    def failure(self, test: str) -> str:
        """Return the report of the failure or error of `test`, without its headline."""
        found = re.search(
            rf"^_+ (?:ERROR at \w+ of )?{re.escape(test)} _+$\n(.*?)(?=^(?:__+ \S.* __+|=+ .* =+)$)",
            self.text,
            re.MULTILINE | re.DOTALL,
        )
        assert found is not None, f"no failure of {test} in\n{self.text}"
        return found[1]


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
        self._monkeypatch = monkeypatch
        self._server: SessionServer | None = server
        self._ini = ini
        self._options = options

    def all_plugins(self, *, shuffle: bool = False) -> None:
        """Have sessions load every installed plugin. They do not do so by default, since loading takes long.

        pytest-randomly is loaded only if `shuffle` is true.
        """
        self._monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        self._options = () if shuffle else ("-p", "no:randomly")
        if importlib.util.find_spec("pytest_asyncio") is not None:
            self.ini("asyncio_default_fixture_loop_scope = function")

    def new_interpreters(self) -> None:
        """Have each session start an interpreter, which has imported no module before."""
        self._server = None

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
        results: dict[str, list[str]] = {}
        for pattern in _RESULT_LINES:
            for match in pattern.finditer(text):
                results.setdefault(match["test"].strip(), []).append(match["word"])
        assert "INTERNALERROR" not in text
        return Run(ret, text, errors, results)

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
        path = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": f"{test_folder}{os.pathsep}{path}" if path else test_folder}
        if self._server is not None and self._server.can_start(os.environ):
            return self._server.start(args, folder, [test_folder], environment, output, errors)
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
        if _OUTER_VARIABLES.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return Suite(monkeypatch, session_server)
