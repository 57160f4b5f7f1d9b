"""Fixtures for tests of other projects' plugins: suites that run with this plugin, and without it for comparison.

Each session loads only the plugins that its test names, so all of them can be installed together.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.features.conftest import Suite, session_server, suite
from tests.run import Run
from tests.session_server import SessionServer

__all__ = ["Pair", "needs", "pair", "session_server", "suite"]

_PLAIN_INI = """
[pytest]
filterwarnings = error
markers =
    distributed: unknown without this plugin
    devices: unknown without this plugin
"""


def needs(*modules: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if one of `modules` is not installed. The extra `plugins` has all of them."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@dataclass(frozen=True)
class Pair:
    """One suite in two folders. The marks of its tests have an effect in `marked` only."""

    plain: Suite
    """The suite that runs without this plugin."""
    marked: Suite
    """The suite that runs with this plugin."""

    def plugin(self, *names: str) -> None:
        """Load the plugins `names` in the sessions of both suites. The names are those that ``-p`` takes."""
        for one in (self.plain, self.marked):
            for name in names:
                one.plugin(name)

    def without_torch(self) -> None:
        """Have the sessions of both suites run as if torch were not installed."""
        for one in (self.plain, self.marked):
            one.without_torch()

    def ini(self, text: str) -> None:
        """Add lines to both ini files."""
        for one in (self.plain, self.marked):
            one.ini(text)

    def write(self, name: str, text: str) -> None:
        """Write a file in both folders."""
        for one in (self.plain, self.marked):
            one.write(name, text)

    def run_both(self, *args: str) -> tuple[Run, Run]:
        """Run both suites and return their sessions; fail unless exit status and results are equal."""
        plain = self.plain.run(*args)
        assert plain.results
        return plain, self.run_marked(plain, *args)

    def run_marked(self, plain: Run, *args: str) -> Run:
        """Run the marked suite and return its session; fail unless exit status and results equal those of `plain`."""
        marked = self.marked.run(*args)
        assert marked.results == plain.results
        assert marked.ret == plain.ret
        return marked


@pytest.fixture
def pair(suite: Suite, session_server: SessionServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    """Provide a pair of empty suites, whose sessions share no lock with other sessions."""
    folders = tmp_path / "plain", tmp_path / "marked"
    for folder in folders:
        folder.mkdir()
    plain = Suite(monkeypatch, session_server, folders[0], ini=_PLAIN_INI, options=("-p", "xdist"))
    return Pair(plain, Suite(monkeypatch, session_server, folders[1]))
