"""Tests of plugins that store expected values: ranks compare, and rank 0 writes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.features.conftest import Suite
from tests.features.plugins.conftest import Pair, needs
from tests.run import Run

_IGNORED_FOLDERS = ("__pycache__", ".pytest_cache", "runpytest-")
_HEAD = """
import os
import signal
from pathlib import Path

import pytest

VALUE = Path(__file__).with_name("value").read_text()
RANK = os.environ.get("RANK", "0")
both = pytest.mark.distributed(2)
"""


def read_files(suite: Suite) -> dict[str, bytes]:
    """Return the contents of the files in subfolders of the suite, by path."""
    found = {path.relative_to(suite.path): path for path in suite.path.rglob("*") if path.is_file()}
    return {
        str(name): path.read_bytes()
        for name, path in found.items()
        if len(name.parts) > 1 and not any(part.startswith(_IGNORED_FOLDERS) for part in name.parts)
    }


def run_both(pair: Pair, *args: str, workers: tuple[str, ...] = ()) -> Run:
    """Run both suites, the marked one with `workers`, and return its session; fail if outcomes or files differ."""
    plain, marked = pair.plain.run(*args), pair.marked.run(*args, *workers)
    assert (marked.ret, marked.outcomes()) == (plain.ret, plain.outcomes())
    assert read_files(pair.marked) == read_files(pair.plain)
    return marked


_FILES = """
@both
def test_text(snapshot):
    snapshot.assert_match(VALUE, "value.txt")
    snapshot.assert_match("same", "same.txt")
    snapshot.assert_match(VALUE.encode() + b"\\xff", "raw.bin")

@both
def test_folder(snapshot):
    snapshot.assert_match_dir({VALUE + ".txt": "1", "deep": {"same.txt": "2"}}, "folder")

@both
def test_one_rank_requests_it(request):
    if RANK == "0":
        request.getfixturevalue("snapshot").assert_match(VALUE, "value.txt")

def test_unmarked(snapshot): snapshot.assert_match(VALUE, "value.txt")
"""
_BY_RANK = """
@both
def test_differs(snapshot, rank):
    if hasattr(snapshot, "snapshot_dir"):
        snapshot.assert_match(f"{VALUE} of rank {rank}", "value.txt")
    else:
        assert snapshot == f"{VALUE} of rank {rank}"
"""


def expect_values_of_rank_0(suite: Suite) -> None:
    """Check that the values of rank 0 were stored, and that another rank compares with them."""
    stored = b"".join(read_files(suite).values())
    assert b"second of rank 0" in stored
    assert b"of rank 1" not in stored
    compared = suite.run("-k", "test_differs")
    compared.expect({"test_differs": "FAILED"})
    assert "second of rank 1" in compared.failure("test_differs")


@needs("pytest_snapshot")
def test_pytest_snapshot_handles_marked_tests_like_unmarked_ones(pair: Pair) -> None:
    """Snapshots are created, compared, updated and deleted as for unmarked tests, with and without xdist."""
    pair.plugin("pytest_snapshot.plugin")
    pair.write("value", "first")
    pair.write("test_files.py", _HEAD + _FILES)
    created = run_both(pair, "--snapshot-update", workers=("-n1",))
    assert "Created snapshots:\n    value.txt\n    same.txt\n    raw.bin" in created.failure("test_text")
    assert len(read_files(pair.marked)) == 7

    pair.write("value", "second")
    compared = run_both(pair)
    assert "+ second" in compared.failure("test_text")
    updated = run_both(pair, "--snapshot-update", "--allow-snapshot-deletion")
    assert "Deleted snapshots:\n    folder/first.txt" in updated.failure("test_folder")
    pair.marked.write("test_by_rank.py", _HEAD + _BY_RANK)
    pair.marked.run("--snapshot-update", "-k", "test_differs")
    expect_values_of_rank_0(pair.marked)


_MIXED = """
from syrupy.extensions.json import JSONSnapshotExtension
from syrupy.extensions.single_file import SingleFileSnapshotExtension

class Raw(SingleFileSnapshotExtension):
    file_extension = "raw"

@both
@pytest.mark.parametrize("number", range(3))
def test_amber(snapshot, number):
    for part in range(3):
        assert {"number": number, "part": part, "value": VALUE} == snapshot

@both
def test_single_files(snapshot):
    assert {"value": VALUE} == snapshot(extension_class=JSONSnapshotExtension)
    assert VALUE.encode() + bytes(range(256)) == snapshot(extension_class=Raw)

@both
def test_skips_later(snapshot):
    if VALUE != "first":
        pytest.skip("later")
    assert "kept, too" == snapshot

@both
def test_fails_after(snapshot):
    assert VALUE == snapshot
    assert VALUE == "first"

@both
def test_one_rank_requests_it(request):
    if RANK == "0":
        assert VALUE == request.getfixturevalue("snapshot")

def test_unmarked(snapshot): assert VALUE == snapshot
"""
_STALE = """
@both
def test_stale(snapshot):
    if VALUE == "first":
        assert "of a marked test" == snapshot(name="kept")

def test_unmarked_stale(snapshot):
    if VALUE == "first":
        assert "of an unmarked test" == snapshot(name="removed")
"""


@needs("syrupy")
def test_syrupy_compares_and_writes_snapshots_as_those_of_unmarked_tests(pair: Pair) -> None:
    pair.plugin("syrupy")
    pair.write("value", "first")
    pair.write("test_mixed.py", _HEAD + _MIXED)
    run_both(pair, "--snapshot-update", workers=("-n2",))
    assert len(read_files(pair.marked)) == 3
    pair.write("value", "other")
    run_both(pair)
    run_both(pair, "--snapshot-update")


@needs("syrupy")
def test_rank_0_writes_snapshots_of_syrupy_and_unused_ones_of_marked_tests_stay(pair: Pair) -> None:
    suite = pair.marked
    suite.plugin("syrupy")
    suite.write("value", "first")
    suite.write("test_ranks.py", _HEAD + _BY_RANK + _STALE)
    assert suite.run("--snapshot-update").ret == 0
    suite.write("value", "second")
    assert suite.run("--snapshot-update").ret == 0
    stored = read_files(suite)["__snapshots__/test_ranks.ambr"]
    assert b"of a marked test" in stored
    assert b"of an unmarked test" not in stored
    expect_values_of_rank_0(suite)


_INLINE = """
from inline_snapshot import snapshot

@both
def test_equal():
    assert {"a": [1, 2]} == snapshot({"a": [1, 2]})
    assert 5 in snapshot([5, 6])

@both
def test_differs(): assert {"a": [1, 2]} == snapshot({"a": [1, 3]})

def test_unmarked(): assert 5 == snapshot(5)
"""


@needs("inline_snapshot")
def test_ranks_compare_inline_snapshots_and_changes_are_refused(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "BUILD_ID", "BUILD_NUMBER", "BUILDKITE", "CIRCLECI", "GITHUB_ACTIONS", "JENKINS_URL"):
        monkeypatch.delenv(name, raising=False)  # CI makes inline-snapshot inactive unless a flag is given.
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    pair.plugin("inline_snapshot.pytest_plugin")
    pair.write("value", "")
    pair.write("test_inline.py", _HEAD + _INLINE)
    for args in ((), ("-n1",)):
        marked = pair.marked.run(*args)
        assert marked.outcomes() == {"test_equal": "PASSED", "test_differs": "FAILED", "test_unmarked": "PASSED"}
    assert "{'a': [1, 2]} == {'a': [1, 3]}" in marked.failure("test_differs")
    source = pair.marked.path / "test_inline.py"
    before = source.read_text()
    reported = pair.marked.run("--inline-snapshot=report", "-k", "equal")
    assert reported.outcomes() == {"test_equal": "PASSED"}
    monkeypatch.setenv("INLINE_SNAPSHOT_DEFAULT_FLAGS", "update")
    for args in (("--inline-snapshot=create,fix",), ()):
        refused = pair.marked.run(*args)
        assert refused.ret == pytest.ExitCode.USAGE_ERROR
        text = "inline-snapshot's create, fix, trim and update do not work for tests in ranks: do without it"
        assert text in refused.text + refused.errors
    assert pair.marked.run("--inline-snapshot=fix", "-m", "not distributed").ret == 0
    assert source.read_text() == before
    assert not list(temporary.glob("inline-snapshot-*"))


@needs("approvaltests")
def test_approvaltests_verifies_in_rank_0_alone(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPROVALTESTS_DISABLE_SCRIPT_DOWNLOADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    suite.plugin("approvaltests.integrations.pytest.pytest_plugin")
    suite.write(
        "test_it.py",
        """
        import pytest
        from approvaltests import verify

        pytestmark = pytest.mark.distributed(2)

        def test_rank_0(rank):
            if rank == 0:
                verify("same")

        def test_all_ranks(rank): verify("same")
        """,
    )
    for test in ("rank_0", "all_ranks"):
        suite.write(f"test_it.test_{test}.approved.txt", "same\n")
    run = suite.run("-W", "ignore")
    assert run.outcomes() == {"test_rank_0": "PASSED", "test_all_ranks": "FAILED"}
    assert "verify() of ApprovalTests works in rank 0 alone" in run.failure("test_all_ranks")
    assert list(suite.path.glob("*.received.*")) == []
