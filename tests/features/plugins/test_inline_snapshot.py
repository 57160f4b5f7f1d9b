"""Tests of inline-snapshot: ranks compare, and flags that change snapshots are refused with marked tests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.features.plugins.conftest import Pair

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
_DYING = """

@both
def test_dies(rank):
    assert 5 == snapshot(5)
    if rank == 1:
        os._exit(0)
"""
_SKIPPED_RULE = "accel_rules = test_skipped.py: distributed(2)"
_SKIPPED = """
import pytest
from inline_snapshot import snapshot


@pytest.mark.skip
def test_skipped():
    assert 5 == snapshot(4)
"""
"""A test that the rule marks. A session of this file alone starts no fork server, and refuses what others refuse."""


_TERMINAL_CONFTEST = """
import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure():
    sys.stdout.isatty = lambda: True
"""
_CI = ("CI", "BUILD_ID", "BUILD_NUMBER", "BUILDKITE", "CIRCLECI", "GITHUB_ACTIONS", "JENKINS_URL", "TEAMCITY_VERSION")
"""Environment variables that make inline-snapshot inactive unless a flag is given."""


@pytest.fixture(autouse=True)
def _not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables that CI systems set."""
    for name in _CI:
        monkeypatch.delenv(name, raising=False)


def test_ranks_compare_and_changes_are_refused(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes equal those of unmarked tests. Flags that change snapshots are refused if marked tests are selected."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    pair.plugin("inline_snapshot.pytest_plugin")
    pair.write("test_inline.py", _SUITE)
    for args in ((), ("-n1",)):
        _, marked = pair.run_both(*args)
    assert "{'a': [1, 2]} == {'a': [1, 3]}" in marked.failure("test_differs")

    source = pair.marked.write("test_inline.py", _SUITE + _DYING).read_text()
    refused = pair.marked.run("--inline-snapshot=create,fix")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert "--inline-snapshot=create,fix cannot be used with tests that run in ranks" in refused.text + refused.errors
    reported = pair.marked.run("--inline-snapshot=report", "-k", "dies or equal")
    assert reported.outcomes() == {"test_equal": "PASSED", "test_dies": "FAILED"}
    assert pair.marked.run("--inline-snapshot=fix", "-m", "not distributed").ret == 0
    assert (pair.marked.path / "test_inline.py").read_text() == source
    assert not list(temporary.glob("inline-snapshot-*"))


def test_default_flags_that_change_snapshots_are_refused(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.plugin("inline_snapshot.pytest_plugin")
    suite.ini(_SKIPPED_RULE)
    suite.write("test_skipped.py", _SKIPPED)
    suite.write("pyproject.toml", '[tool.inline-snapshot]\ndefault-flags = ["create", "fix"]\n')
    _check_refused(suite, "the default flags of pyproject.toml, create,fix,")
    monkeypatch.setenv("INLINE_SNAPSHOT_DEFAULT_FLAGS", "update")
    _check_refused(suite, "INLINE_SNAPSHOT_DEFAULT_FLAGS=update")


def _check_refused(suite: Suite, flags: str, *args: str) -> None:
    """Check that a session with a marked test refuses `flags`."""
    refused = suite.run(*args, "test_skipped.py")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert f"{flags} cannot be used with tests that run in ranks" in refused.text + refused.errors


def test_inline_snapshot_reports_by_default_at_a_terminal(pair: Pair) -> None:
    """At a terminal, a session with marked tests compares and reports by default, and asks no question."""
    pair.plugin("inline_snapshot.pytest_plugin")
    pair.write("test_inline.py", _SUITE.replace("== snapshot(5)", "== snapshot()"))
    pair.marked.write("conftest.py", _TERMINAL_CONFTEST)
    _, marked = pair.run_both()
    assert "These changes are not applied." in marked.text
    assert "Do you want to" not in marked.text
