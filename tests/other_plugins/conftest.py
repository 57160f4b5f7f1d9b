"""Suites that run twice: marked tests with this plugin, and the same tests without it.

Each session loads only the plugins that its test names, so all of them can be installed together.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.features.conftest import Run, Suite, suite

__all__ = ["Pair", "needs", "pair", "suite"]

_PLAIN_INI = """
[pytest]
filterwarnings = error
markers =
    distributed: unknown without this plugin
    devices: unknown without this plugin
"""


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip a test whose plugins are not installed: the extra `plugins` has them."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@dataclass(frozen=True)
class Pair:
    """One suite in two folders. The marks of its tests mean something in `marked` alone."""

    plain: Suite
    """Runs without this plugin."""
    marked: Suite
    """Runs with it."""

    def plugin(self, *names: str) -> None:
        """Have the sessions of both load the plugins `names`, as ``-p`` has them."""
        for one in (self.plain, self.marked):
            for name in names:
                one.plugin(name)

    def ini(self, text: str) -> None:
        """Add lines to both ini files."""
        for one in (self.plain, self.marked):
            one.ini(text)

    def write(self, name: str, text: str) -> None:
        """Make a file in both folders."""
        for one in (self.plain, self.marked):
            one.write(name, text)

    def agree(self, *args: str) -> tuple[Run, Run]:
        """Return a session in each folder; fail unless their exit status and the outcomes of all tests are equal."""
        plain, marked = self.plain.run(*args), self.marked.run(*args)
        assert plain.words
        assert marked.outcomes() == plain.outcomes()
        assert marked.ret == plain.ret
        return plain, marked


@pytest.fixture
def pair(suite: Suite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    """Two empty folders, and sessions in them that share no lock with any other."""
    folders = tmp_path / "plain", tmp_path / "marked"
    for folder in folders:
        folder.mkdir()
    plain = Suite(pytester, monkeypatch, folders[0], ini=_PLAIN_INI, options=("-p", "xdist"))
    return Pair(plain, Suite(pytester, monkeypatch, folders[1]))
