"""Tests of syrupy: ranks compare, and the driver writes the snapshots on which all ranks agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.features.plugins.conftest import Pair

pytestmark = needs("syrupy")

_MIXED = """
import os
from pathlib import Path

import pytest
from syrupy.extensions.json import JSONSnapshotExtension
from syrupy.extensions.single_file import SingleFileSnapshotExtension

VALUE = Path(__file__).with_name("value").read_text()
both = pytest.mark.distributed(2)


class Raw(SingleFileSnapshotExtension):
    file_extension = "raw"


@pytest.fixture
def as_json(snapshot):
    return snapshot.use_extension(JSONSnapshotExtension)


@both
@pytest.mark.parametrize("number", range(3))
def test_amber(snapshot, number):
    for part in range(3):
        assert {"number": number, "part": part, "value": VALUE} == snapshot


@both
class TestNamed:
    def test_names(self, snapshot):
        assert VALUE == snapshot(name="one")
        assert "fixed" == snapshot(name="two")


@both
def test_single_files(snapshot, as_json):
    assert {"value": VALUE} == as_json
    assert VALUE.encode() + bytes(range(256)) == snapshot(extension_class=Raw)


@both
@pytest.mark.skipif(VALUE != "first", reason="later")
def test_skipped_later(snapshot):
    assert "kept" == snapshot


@both
def test_skips_later(snapshot):
    if VALUE != "first":
        pytest.skip("later")
    assert "kept, too" == snapshot


@both
@pytest.mark.xfail(VALUE == "other", reason="not yet", strict=True)
def test_expected(snapshot):
    assert VALUE == snapshot


@both
def test_fails_after(snapshot):
    assert VALUE == snapshot
    assert VALUE == "first"


@both
def test_without(snapshot):
    pass


@both
def test_one_rank_requests_it(request):
    if os.environ.get("RANK", "0") == "0":
        assert VALUE == request.getfixturevalue("snapshot")


def test_unmarked(snapshot, as_json):
    assert VALUE == snapshot
    assert VALUE == as_json
"""
_STALE = """
def test_unmarked(snapshot):
    if VALUE == "first":
        assert VALUE == snapshot(name="stale")


@both
def test_marked(snapshot):
    if VALUE == "first":
        assert VALUE == snapshot(name="stale")
"""
_DISAGREEING = """
import os
import signal
from pathlib import Path

import pytest
from syrupy.extensions.amber import AmberSnapshotExtension

VALUE = Path(__file__).with_name("value").read_text()
first = VALUE == "first"
pytestmark = pytest.mark.distributed(2)


def test_differs(snapshot, rank):
    assert ["alike", f"of rank {0 if first else rank}", "alike"] == snapshot
    assert VALUE == snapshot


def test_one_rank_changes(snapshot, rank):
    assert (VALUE if rank else "first") == snapshot


def test_by_rank(snapshot, rank):
    assert f"{rank} {VALUE}" == snapshot(name=f"rank {rank}")


def test_dies(snapshot, rank):
    assert VALUE == snapshot
    if rank == 1 and not first:
        os.kill(os.getpid(), signal.SIGKILL)


def test_in_a_function(snapshot):
    class Local(AmberSnapshotExtension):
        pass

    if not first:
        assert 1 == snapshot.use_extension(Local)
"""


def read_snapshots(suite: Suite) -> dict[str, bytes]:
    """Return the contents of the files in snapshot folders, by path."""
    files = [path for path in suite.path.rglob("__snapshots__/**/*") if path.is_file()]
    return {str(path.relative_to(suite.path)): path.read_bytes() for path in files}


def run_both(pair: Pair, *args: str, workers: tuple[str, ...] = ()) -> None:
    """Run both suites, the marked one with `workers`; fail if outcomes or snapshots differ."""
    plain, marked = pair.plain.run(*args), pair.marked.run(*args, *workers)
    assert (marked.ret, marked.outcomes()) == (plain.ret, plain.outcomes())
    assert read_snapshots(pair.marked) == read_snapshots(pair.plain)


def test_snapshots_are_compared_and_written_as_those_of_unmarked_tests(pair: Pair) -> None:
    pair.plugin("syrupy")
    pair.write("value", "first")
    pair.write("test_mixed.py", _MIXED)
    run_both(pair, "--snapshot-update", workers=("-n2",))
    assert len(read_snapshots(pair.marked)) == 4
    pair.write("value", "other")
    run_both(pair)
    run_both(pair, "--snapshot-update")


def test_unused_snapshots_of_marked_tests_are_kept(pair: Pair) -> None:
    suite = pair.marked
    suite.plugin("syrupy")
    suite.write("value", "first")
    header = _MIXED.partition("class Raw")[0]
    suite.write("test_stale.py", header + _STALE)
    assert suite.run("--snapshot-update").ret == 0
    suite.write("value", "other")
    run = suite.run("--snapshot-update")
    assert run.ret == 0
    assert "1 unused snapshot deleted" in run.text
    stored = read_snapshots(suite)["__snapshots__/test_stale.ambr"]
    assert b"test_marked[stale]" in stored
    assert b"test_unmarked[stale]" not in stored


def test_snapshots_are_left_if_ranks_disagree_or_die(pair: Pair) -> None:
    suite = pair.marked
    suite.plugin("syrupy")
    suite.write("value", "first")
    suite.write("test_ranks.py", _DISAGREEING)
    assert suite.run("--snapshot-update").ret == 0
    before = read_snapshots(suite)["__snapshots__/test_ranks.ambr"]
    suite.write("value", "second")
    run = suite.run("--snapshot-update")
    assert {name for name, word in run.outcomes().items() if word == "PASSED"} == {"test_by_rank"}
    failure = run.failure("test_differs")
    assert "the snapshot 'test_differs' of " in failure
    assert "-(as it is stored)\n+list([\n+  'alike',\n+  'of rank 1'," in failure
    assert "-(as it is stored)\n+'second'" in run.failure("test_one_rank_changes")
    assert "test_in_a_function.<locals>.Local is not at the top level" in run.failure("test_in_a_function")
    after = read_snapshots(suite)["__snapshots__/test_ranks.ambr"]
    assert after.count(b"second") == 3  # Both ranks of test_by_rank, and the second value of test_differs.
    assert after.replace(b"second", b"first") == before
