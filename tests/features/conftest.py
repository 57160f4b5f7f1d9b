"""Sessions of small suites, each a process of its own, and their results by test."""

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
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deadline import Deadline

_WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|RERUN|SUBPASSED|SUBFAILED|SUBSKIPPED"
_LINES = (
    re.compile(rf"^(?P<test>\S+::.+?) (?P<word>{_WORDS})\b", re.MULTILINE),
    re.compile(rf"^\[gw\d+\] (?:\[ *\d+%\] )?(?P<word>{_WORDS}) (?P<test>\S+::.+?)(?: <- .*| \(.*)?$", re.MULTILINE),
)
_TIMEOUT = 150.0
"""Seconds of a machine that is not busy (`Deadline`) after which a session counts as hung; none takes a tenth of it."""
_INI = """
[pytest]
accel = sim:4
filterwarnings = error
"""
_FOREIGN = re.compile(
    "PYTEST_(?!DEBUG_TEMPROOT)|COV_CORE|COVERAGE_|[A-Z]+_VISIBLE_DEVICES$|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_[A-Z]+|OMP_NUM_THREADS)$"
)
"""Variables that an outer session or launcher may have set."""


@dataclass(frozen=True)
class Run:
    """A session that has ended."""

    ret: int
    text: str
    errors: str
    words: dict[str, list[str]]
    """The results that ``-v`` has shown for each test, in their order."""

    def word(self, test: str) -> str:
        """The one word for `test`, which may be given by the end of its id."""
        found = [words for name, words in self.words.items() if name == test or name.endswith(f"::{test}")]
        assert len(found) == 1, f"{test}: {len(found)} tests of this name in\n{self.text}"
        return " ".join(found[0])

    def outcomes(self) -> dict[str, str]:
        """The words for each test, by the end of its id."""
        return {name.rpartition("::")[2]: " ".join(words) for name, words in self.words.items()}

    def count(self) -> dict[str, int]:
        """Return the number of tests by result."""
        counts: dict[str, int] = {}
        for words in self.words.values():
            for word in words:
                counts[word] = counts.get(word, 0) + 1
        return counts

    def failure(self, test: str) -> str:
        """The part of the text under the headline of `test`."""
        found = re.search(
            rf"^_+ (?:ERROR at \w+ of )?{re.escape(test)} _+$\n(.*?)(?=^(?:__+ \S.* __+|=+ .* =+)$)",
            self.text,
            re.MULTILINE | re.DOTALL,
        )
        assert found is not None, f"no failure of {test} in\n{self.text}"
        return found[1]


class Suite:
    """A folder with test files, and pytest sessions in it."""

    def __init__(
        self,
        pytester: pytest.Pytester,
        monkeypatch: pytest.MonkeyPatch,
        path: Path | None = None,
        ini: str = _INI,
        options: tuple[str, ...] = ("-p", "accel", "-p", "xdist"),
    ) -> None:
        """Make a suite in the folder `path` (None: pytester's); its sessions get `options`."""
        self.path = path or pytester.path
        self._start = path
        """The folder in which sessions start; None: the test's current one."""
        self._pytester = pytester
        self._sessions = 0
        self._monkeypatch = monkeypatch
        self._ini = ini
        self._options = options

    def all_plugins(self, *, shuffle: bool = False) -> None:
        """Have sessions load every plugin that is installed: many, which most tests need not wait for."""
        self._monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        self._options = () if shuffle else ("-p", "no:randomly")
        if importlib.util.find_spec("pytest_asyncio") is not None:
            self.ini("asyncio_default_fixture_loop_scope = function")

    def plugin(self, name: str) -> None:
        """Have sessions load the plugin `name` too."""
        self._options += ("-p", name)

    def ini(self, text: str) -> None:
        """Add lines to the ini file."""
        self._ini += textwrap.dedent(text).strip("\n") + "\n"

    def write(self, name: str, text: str) -> Path:
        """Make a file."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def read(self, name: str) -> list[str]:
        """The lines of a file that tests have written; none where there is no file."""
        path = self.path / name
        return path.read_text().splitlines() if path.exists() else []

    def run(self, *args: str, quiet: bool = False) -> Run:
        """Run a session to its end."""
        (self.path / "pytest.ini").write_text(self._ini)
        options = self._options if quiet else (*self._options, "-v")
        ret, text, errors = self._finish([*options, *args])
        words: dict[str, list[str]] = {}
        for pattern in _LINES:
            for match in pattern.finditer(text):
                words.setdefault(match["test"].strip(), []).append(match["word"])
        assert "INTERNALERROR" not in text
        return Run(ret, text, errors, words)

    def _finish(self, args: list[str]) -> tuple[int, str, str]:
        """Return the exit status, output and errors of a session; fail if it hangs."""
        self._sessions += 1
        command = [sys.executable, "-m", "pytest", f"--basetemp={self.path / f'runpytest-{self._sessions}'}", *args]
        limit = Deadline(_TIMEOUT)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = self._pytester.popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=self._start
            )
            while process.poll() is None and not limit.expired:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
            hangs = process.poll() is None
            if hangs:
                process.kill()
                process.wait()
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read())
        print(shlex.join(command), *texts, sep="\n")
        assert not hangs, "the session hangs"
        return process.returncode, texts[0], texts[1]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Suite:
    """An empty folder, and sessions that share no lock with any other."""
    for name in os.environ:
        if _FOREIGN.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return Suite(pytester, monkeypatch)
