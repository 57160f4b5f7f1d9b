"""inline-snapshot on marked tests: ranks compare, and nothing is changed by what they have not told."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    import pytest

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


def test_comparing_and_changing(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
