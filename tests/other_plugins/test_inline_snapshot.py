"""inline-snapshot on marked tests: ranks compare, and nothing is changed by what they have not told."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

pytestmark = needs("inline_snapshot")

_SUITE = """
import os

import pytest
from inline_snapshot import snapshot

both = pytest.mark.distributed(2)


@both
def test_equal():
    assert {"a": [1, 2]} == snapshot({"a": [1, 2]})
    assert 5 in snapshot([5, 6])


@both
def test_differs():
    assert {"a": [1, 2]} == snapshot({"a": [1, 3]})


@both
def test_without_value():
    assert 5 == snapshot()


@both
@pytest.mark.xfail
def test_expected():
    assert 5 == snapshot(4)


def test_unmarked():
    assert 5 == snapshot(5)
"""
_LOST = """

@both
def test_dies(rank):
    assert 5 == snapshot(5)
    if rank == 1:
        os._exit(0)
"""


_TERMINAL = """
import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure():
    sys.stdout.isatty = lambda: True
"""
_CI = ("CI", "BUILD_ID", "BUILD_NUMBER", "BUILDKITE", "CIRCLECI", "GITHUB_ACTIONS", "JENKINS_URL", "TEAMCITY_VERSION")
"""Variables with which inline-snapshot is inactive unless a flag is given."""


@pytest.fixture(autouse=True)
def _not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _CI:
        monkeypatch.delenv(name, raising=False)


def test_ranks_compare_and_changes_are_refused(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes are those of unmarked tests; flags that change snapshots are refused while marked tests are selected."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    pair.plugin("inline_snapshot.pytest_plugin")
    pair.write("test_inline.py", _SUITE)
    for args in ((), ("-n", "2")):
        plain, marked = pair.plain.run(*args), pair.marked.run(*args)
        assert marked.outcomes() == plain.outcomes()
        assert marked.ret == plain.ret
    assert "{'a': [1, 2]} == {'a': [1, 3]}" in marked.failure("test_differs")

    source = pair.marked.write("test_inline.py", _SUITE + _LOST).read_text()
    refused = pair.marked.run("--inline-snapshot=create,fix")
    assert refused.ret == 4
    assert "--inline-snapshot=create,fix cannot be used with tests that run in ranks" in refused.text + refused.errors
    lost = pair.marked.run("--inline-snapshot=report", "-k", "dies or equal")
    assert lost.outcomes() == {"test_equal": "PASSED", "test_dies": "FAILED"}
    assert pair.marked.run("--inline-snapshot=fix", "-m", "not distributed").ret == 0
    assert (pair.marked.path / "test_inline.py").read_text() == source
    assert not list(temporary.glob("inline-snapshot-*"))


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ('default-flags = ["create", "fix"]', "create,fix"),
        ('default-flags = ["report"]\ndefault-flags-tui = ["trim", "report"]', "report,trim"),
    ],
    ids=["anywhere", "at a terminal"],
)
def test_default_flags_that_change_snapshots_are_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, settings: str, flags: str
) -> None:
    """Flags of pyproject.toml are refused where they apply to the session and change snapshots."""
    pair.plugin("inline_snapshot.pytest_plugin")
    source = pair.marked.write("test_inline.py", _SUITE)
    pair.marked.write("pyproject.toml", f"[tool.inline-snapshot]\n{settings}\n")
    if "tui" in settings:
        assert pair.marked.run("-k", "equal").ret == 0
        pair.marked.write("conftest.py", _TERMINAL)
    refused = pair.marked.run()
    assert refused.ret == 4
    assert f"the default flags of pyproject.toml, {flags}, cannot be used with" in refused.text + refused.errors
    assert pair.marked.run("--inline-snapshot=report", "-k", "equal").ret == 0
    # As without marks, nothing is changed under xdist, and where a variable takes the place of the file.
    assert pair.marked.run("-n", "2", "-k", "equal").ret == 0
    monkeypatch.setenv("INLINE_SNAPSHOT_DEFAULT_FLAGS", "report")
    assert pair.marked.run("-k", "equal").ret == 0
    monkeypatch.setenv("INLINE_SNAPSHOT_DEFAULT_FLAGS", "update")
    refused = pair.marked.run("-k", "equal")
    assert "INLINE_SNAPSHOT_DEFAULT_FLAGS=update cannot be used with" in refused.text + refused.errors
    assert source.read_text() == _SUITE


def test_the_default_at_a_terminal_is_to_report(pair: Pair) -> None:
    """By default a session with marked tests runs as it does elsewhere: it compares, reports and asks nothing."""
    pair.plugin("inline_snapshot.pytest_plugin")
    pair.write("test_inline.py", _SUITE.replace("== snapshot(5)", "== snapshot()"))
    pair.marked.write("conftest.py", _TERMINAL)
    _, marked = pair.agree()
    assert "These changes are not applied." in marked.text
    assert "Do you want to" not in marked.text
    for flags in ("review", "create,review"):
        refused = pair.marked.run(f"--inline-snapshot={flags}")
        assert f"--inline-snapshot={flags} cannot be used with" in refused.text + refused.errors
