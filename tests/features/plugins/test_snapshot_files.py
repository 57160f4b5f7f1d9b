"""Tests of pytest-snapshot and ApprovalTests, which store expected files beside the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    import pytest

    from tests.features.conftest import Suite
    from tests.features.plugins.conftest import Pair
    from tests.run import Run

_IGNORED_FOLDERS = ("__pycache__", ".pytest_cache", "runpytest-")


def read_files(suite: Suite) -> dict[str, bytes]:
    """Return the contents of the files in subfolders of the suite, by path."""
    found = {path.relative_to(suite.path): path for path in suite.path.rglob("*") if path.is_file()}
    return {
        str(name): path.read_bytes()
        for name, path in found.items()
        if len(name.parts) > 1 and not any(part.startswith(_IGNORED_FOLDERS) for part in name.parts)
    }


def run_both(pair: Pair, *args: str, workers: tuple[str, ...] = ()) -> Run:
    """Run both suites, the marked one with `workers`, and return the session of the marked suite.

    Fail if outcomes or files differ.
    """
    plain, marked = pair.plain.run(*args), pair.marked.run(*args, *workers)
    assert marked.outcomes() == plain.outcomes()
    assert marked.ret == plain.ret
    assert read_files(pair.marked) == read_files(pair.plain)
    return marked


_SNAPSHOT = """
import os
from pathlib import Path

import pytest

VALUE = Path(__file__).with_name("value").read_text()
both = pytest.mark.distributed(2)


@both
def test_text(snapshot):
    snapshot.assert_match(VALUE, "value.txt")
    snapshot.assert_match("same", "same.txt")
    snapshot.assert_match(VALUE.encode() + b"\\xff", "raw.bin")


@both
@pytest.mark.parametrize("name", ["left", "right"])
def test_elsewhere(snapshot, name):
    snapshot.snapshot_dir = Path(__file__).with_name("stored")
    snapshot.assert_match(name + VALUE, f"{name}.txt")


@both
def test_folder(snapshot):
    snapshot.assert_match_dir({VALUE + ".txt": "1", "deep": {"same.txt": "2"}}, "folder")


@both
def test_one_rank_requests_it(request):
    if os.environ.get("RANK", "0") == "0":
        request.getfixturevalue("snapshot").assert_match(VALUE, "value.txt")


def test_unmarked(snapshot):
    snapshot.assert_match(VALUE, "value.txt")
"""
_SNAPSHOT_BY_RANK = """
import pytest

@pytest.mark.distributed(2)
def test_differs(snapshot, rank):
    snapshot.assert_match("alike", "alike.txt")
    snapshot.assert_match(f"of rank {rank}", "value.txt")
"""


@needs("pytest_snapshot")
def test_pytest_snapshot_handles_marked_tests_like_unmarked_ones(pair: Pair) -> None:
    """Snapshots are created, compared, updated and deleted as for unmarked tests, with and without xdist."""
    pair.plugin("pytest_snapshot.plugin")
    pair.write("value", "first")
    pair.write("test_files.py", _SNAPSHOT)
    created = run_both(pair, "--snapshot-update", workers=("-n1",))
    assert "Created snapshots:\n    value.txt\n    same.txt\n    raw.bin" in created.failure("test_text")
    assert len(read_files(pair.marked)) == 9

    pair.write("value", "second")
    compared = run_both(pair)
    assert compared.result("test_elsewhere[left]") == "FAILED"
    assert "+ second" in compared.failure("test_text")
    updated = run_both(pair, "--snapshot-update", "--allow-snapshot-deletion")
    assert "Deleted snapshots:\n    folder/first.txt" in updated.failure("test_folder")
    before = read_files(pair.marked)
    assert "snapshots/test_files/test_folder/folder/second.txt" in before
    assert "snapshots/test_files/test_folder/folder/first.txt" not in before

    pair.marked.write("test_by_rank.py", _SNAPSHOT_BY_RANK)
    differing = pair.marked.run("--snapshot-update", "test_by_rank.py")
    assert "test_by_rank/test_differs/value.txt differs between ranks; it is left as it was" in differing.text
    assert "-of rank 0\n+of rank 1" in differing.text
    assert read_files(pair.marked).keys() - before.keys() == {"snapshots/test_by_rank/test_differs/alike.txt"}


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
        from approvaltests.reporters import PythonNativeReporter
        from approvaltests.core import Options

        pytestmark = pytest.mark.distributed(2)


        def test_rank_0(rank):
            if rank == 0:
                verify("same")


        def test_differs(rank):
            if rank == 0:
                verify("other", options=Options().with_reporter(PythonNativeReporter()))


        def test_all_ranks(rank):
            verify("same")
        """,
    )
    for test, text in (("rank_0", "same"), ("differs", "same"), ("all_ranks", "same")):
        suite.write(f"test_it.test_{test}.approved.txt", f"{text}\n")
    run = suite.run("-W", "ignore")
    assert run.outcomes() == {"test_rank_0": "PASSED", "test_differs": "FAILED", "test_all_ranks": "FAILED"}
    assert "Approval Mismatch, received != approved" in run.failure("test_differs")
    failure = run.failure("test_all_ranks")
    assert "ApprovalTests' verify() works in rank 0 alone" in failure
    assert "use `if rank == 0: verify(...)`" in failure
    assert [path.name for path in suite.path.glob("*.received.*")] == ["test_it.test_differs.received.txt"]
