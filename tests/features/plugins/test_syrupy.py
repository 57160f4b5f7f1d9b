"""Tests of syrupy: snapshots of marked tests are counted, written and kept like those of unmarked tests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.features.plugins.conftest import Pair
    from tests.run import Run

pytestmark = needs("syrupy", "pytest_rerunfailures")

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
        if VALUE != "shorter":
            assert "more" == snapshot(name="three")


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
@pytest.mark.flaky(reruns=1)
def test_begins_again(snapshot):
    begun = Path(__file__).with_name(f"begun.{os.environ.get('RANK')}")
    again = begun.exists()
    begun.touch()
    assert f"{again} {VALUE}" == snapshot
    assert again


@both
@pytest.mark.flaky(reruns=1)
def test_begins_again_unchanged(snapshot, as_json):
    begun = Path(__file__).with_name(f"begun.unchanged.{os.environ.get('RANK')}")
    again = begun.exists()
    begun.touch()
    assert VALUE == snapshot
    assert VALUE == as_json
    assert again


@both
def test_one_rank_requests_it(request):
    if os.environ.get("RANK", "0") == "0":
        assert VALUE == request.getfixturevalue("snapshot")


def test_unmarked(snapshot, as_json):
    assert VALUE == snapshot
    assert VALUE == as_json
"""
_OTHER = """
import pytest


@pytest.mark.distributed(2)
def test_elsewhere(snapshot):
    assert ["elsewhere"] == snapshot
"""


def read_summary(run: Run) -> str:
    """Return syrupy's report at the end of a session, with sorted lines, because workers end in any order."""
    found = re.search(r"^-+ snapshot report summary -+$\n(.*?)^=", run.text, re.MULTILINE | re.DOTALL)
    return "\n".join(sorted(found[1].splitlines())) if found is not None else ""


def read_snapshots(suite: Suite) -> dict[str, bytes]:
    """Return the contents of the files in snapshot folders, by path."""
    files = [path for path in suite.path.rglob("__snapshots__/**/*") if path.is_file()]
    return {str(path.relative_to(suite.path)): path.read_bytes() for path in files}


def run_both(pair: Pair, *args: str, workers: tuple[str, ...] = ()) -> Run:
    """Run both suites, the marked one with `workers`, and return the session of the marked suite.

    Fail if outcomes, summaries or snapshots differ.
    """
    plain, marked = pair.plain.run(*args), pair.marked.run(*args, *workers)
    assert marked.outcomes() == plain.outcomes()
    assert read_summary(marked) == read_summary(plain)
    assert marked.ret == plain.ret
    assert read_snapshots(pair.marked) == read_snapshots(pair.plain)
    return marked


def test_syrupy_handles_marked_tests_like_unmarked_ones(pair: Pair) -> None:
    """Snapshots are created, compared, reported as unused, updated and deleted like those of unmarked tests.

    Under xdist, the controller knows the snapshots that all workers have used, and no worker deletes those of another.
    """
    pair.plugin("syrupy", "rerunfailures")
    pair.write("value", "first")
    pair.write("test_mixed.py", _MIXED)
    pair.write("sub/test_other.py", _OTHER)
    created = run_both(pair, "--snapshot-update", workers=("-n2",))
    assert created.ret == 0
    assert "25 snapshots generated" in read_summary(created)
    assert len(read_snapshots(pair.marked)) == 6

    pair.write("sub/test_other.py", _OTHER.replace('assert ["elsewhere"] == snapshot', "pass"))
    pair.write("value", "other")
    different = run_both(pair, "--snapshot-details")
    assert different.ret == 1
    failure = different.failure("test_amber[1]")
    assert "[+ received] == [- snapshot]" in failure
    assert re.search(r"-\s+'value': 'first'", failure)
    assert re.search(r"\+\s+'value': 'other'", failure)
    assert run_both(pair, "--snapshot-update", "-k", "names or single").ret == 0

    pair.write("value", "shorter")
    before = read_snapshots(pair.marked)
    updated = run_both(pair, "--snapshot-update", "--snapshot-details", workers=("-n2",))
    assert updated.result("test_fails_after") == "FAILED"
    after = read_snapshots(pair.marked)
    assert before.keys() - after.keys() == {"sub/__snapshots__/test_other.ambr"}
    assert b"kept, too" in after["__snapshots__/test_mixed.ambr"]
    assert b"three" not in after["__snapshots__/test_mixed.ambr"]


_DISAGREEING = """
import os
import signal
import time
from pathlib import Path

import pytest
from syrupy.extensions.json import JSONSnapshotExtension

HERE = Path(__file__)
VALUE = HERE.with_name("value").read_text()
first = VALUE == "first"
pytestmark = pytest.mark.distributed(2)


def test_differs(snapshot, rank):
    assert ["alike", f"of rank {0 if first else rank}", "alike"] == snapshot
    assert VALUE == snapshot


def test_all_change(snapshot, rank):
    assert ("first" if first else f"{VALUE} of rank {rank}") == snapshot


def test_one_rank_uses_it(snapshot, rank):
    if rank == 1:
        assert VALUE == snapshot


def test_by_rank(snapshot, rank):
    assert f"{rank} {VALUE}" == snapshot(name=f"rank {rank}")


@pytest.fixture
def reported(rank):
    file = HERE.with_name("reported")
    yield file
    if rank == 0 and not first:
        file.touch()  # The report of the call has been sent.


def test_dies(reported, snapshot, rank):
    assert VALUE == snapshot
    if rank == 1 and not first:
        while not reported.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    assert VALUE == snapshot(extension_class=JSONSnapshotExtension)


@pytest.fixture
def broken(rank):
    assert rank == 0 or first


def test_one_setup_fails(broken, snapshot):
    assert VALUE == snapshot


def test_one_rank_fails(snapshot, rank):
    assert rank == 0 or first
    assert VALUE == snapshot
"""


_BROKEN = """
import os
from pathlib import Path

import pytest

first = Path(__file__).with_name("value").read_text() == "first"
if "RANK" in os.environ and not first:
    raise RuntimeError("in ranks alone")


@pytest.mark.distributed(2)
def test_not_collected(snapshot):
    assert 1 == snapshot


@pytest.mark.devices(1 if first else 64)
def test_no_machine(snapshot):
    assert 1 == snapshot
"""


def _read_stored(suite: Suite) -> dict[str, str]:
    """Return the serialized text of each stored snapshot, by name."""
    text = (suite.path / "__snapshots__/test_ranks.ambr").read_text()
    return dict(re.findall(r"^# name: (.*)\n((?:  .*\n)+)", text, re.MULTILINE))


def test_snapshots_are_kept_if_ranks_disagree_or_die(pair: Pair) -> None:
    """A snapshot is written if all ranks that use it agree, and is kept if a rank has not reported."""
    suite = pair.marked
    suite.plugin("syrupy")
    suite.write("value", "first")
    suite.write("test_ranks.py", _DISAGREEING)
    suite.write("test_broken.py", _BROKEN)
    assert suite.run("--snapshot-update").ret == 0
    before, files = _read_stored(suite), read_snapshots(suite)
    assert len(before) == 9

    suite.write("value", "second")
    run = suite.run("--snapshot-update")
    passed = {name for name, word in run.outcomes().items() if word == "PASSED"}
    assert passed == {"test_one_rank_uses_it", "test_by_rank"}
    after = _read_stored(suite)
    changed = {name for name in before if before[name] != after[name]}
    assert after.keys() == before.keys()
    assert changed == {
        "test_by_rank[rank 0]",
        "test_by_rank[rank 1]",
        "test_differs.1",
        "test_one_rank_fails",
        "test_one_rank_uses_it",
    }
    assert {name for name in files if read_snapshots(suite).get(name) != files[name]} == {
        "__snapshots__/test_ranks.ambr"
    }
    assert "unused" not in read_summary(run)
    failure = run.failure("test_differs")
    assert "the snapshot 'test_differs' differs between ranks (__snapshots__/test_ranks.ambr)" in failure
    assert "'test_dies' is left as it was (__snapshots__/test_ranks.ambr): only rank 0 reported" in run.failure(
        "test_dies"
    )
    assert re.search(r"--- rank 0\n\+\+\+ rank 1\n", failure)
    assert re.search(r"-  'of rank 0',\n\+  'of rank 1',", failure)

    failure = suite.run("-k", "test_all_change").failure("test_all_change")
    assert "[+ received] == [- snapshot]" in failure
    assert re.search(r"-'second of rank 0'\n\+'second of rank 1'", failure)


_EXTENSION = """
import pytest
from syrupy.extensions.single_file import SingleFileSnapshotExtension


class Extension(SingleFileSnapshotExtension):
    file_extension = "{}"


@pytest.fixture
def {}(snapshot):
    return snapshot.use_extension(Extension)
"""
_EXTENSIONS = """
import pytest

pytestmark = pytest.mark.distributed(2)


def test_conftests(of_root, of_folder):
    assert b"root" == of_root
    assert b"folder" == of_folder


def test_imported_late(snapshot):
    from syrupy.extensions.json import JSONSnapshotExtension

    assert [1] == snapshot(extension_class=JSONSnapshotExtension)


def test_in_a_function(snapshot):
    from syrupy.extensions.amber import AmberSnapshotExtension

    class Local(AmberSnapshotExtension):
        pass

    assert 1 == snapshot.use_extension(Local)
"""


def test_extensions_are_found_outside_of_ranks(pair: Pair) -> None:
    """Extensions of conftests and of modules that only ranks import are found. One in a function is refused."""
    pair.plugin("syrupy")
    pair.write("conftest.py", _EXTENSION.format("root", "of_root"))
    pair.write("folder/conftest.py", _EXTENSION.format("folder", "of_folder"))
    pair.write("folder/test_extensions.py", _EXTENSIONS)
    for args in (("--snapshot-update-new-only", "-k", "not function"), ("-k", "not function")):
        assert run_both(pair, *args).ret == 0
    assert [name.rpartition(".")[2] for name in sorted(read_snapshots(pair.marked))] == ["folder", "root", "json"]
    refused = pair.marked.run("-k", "function").failure("test_in_a_function")
    assert "test_in_a_function.<locals>.Local cannot be found outside of the test's ranks" in refused
