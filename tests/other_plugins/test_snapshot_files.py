"""Tests of plugins that store expected files beside the tests: ranks compare, and the driver writes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    import pytest

    from tests.features.conftest import Suite
    from tests.other_plugins.conftest import Pair
    from tests.run import Run

_IGNORED_FOLDERS = ("__pycache__", ".approval_tests_temp", ".pytest_cache", "runpytest-")


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


_REGRESSIONS = """
import os
from pathlib import Path

import pytest

VALUE = Path(__file__).with_name("value").read_text()
both = pytest.mark.distributed(2)


@both
@pytest.mark.parametrize("number", range(2))
def test_data(data_regression, number):
    data_regression.check({"number": number, "value": VALUE})


@both
def test_arrays(ndarrays_regression):
    ndarrays_regression.check({"same": [1.0, 2.0], "size": [float(len(VALUE))]})


@both
class TestFiles:
    def test_text(self, file_regression):
        file_regression.check(VALUE, basename="text", extension=".md")

    def test_bytes(self, file_regression, original_datadir):
        path = original_datadir / "deep" / "raw.bin"
        file_regression.check(VALUE.encode() + b"\\xff", binary=True, extension=".bin", fullpath=path)


@both
def test_datadir(datadir, lazy_shared_datadir):
    (datadir / "input.txt").write_text("changed in the copy")
    assert (lazy_shared_datadir / "shared.txt").read_text() == "shared"


@both
def test_one_rank_requests_it(request):
    if os.environ.get("RANK", "0") == "0":
        request.getfixturevalue("data_regression").check([VALUE])


def test_unmarked(data_regression):
    data_regression.check([VALUE])
"""


@needs("pytest_regressions", "numpy")
def test_pytest_regressions_handles_marked_tests_like_unmarked_ones(pair: Pair) -> None:
    """Expected files are created, compared and regenerated as for unmarked tests, with and without xdist."""
    pair.plugin("pytest_datadir.plugin", "pytest_regressions.plugin")
    pair.write("value", "first")
    pair.write("test_files.py", _REGRESSIONS)
    pair.write("data/shared.txt", "shared")
    pair.write("test_files/input.txt", "input")
    created = run_both(pair)
    assert created.result("test_datadir") == "PASSED"
    assert created.result("test_data[1]") == "FAILED"
    assert "File not found in data directory, created:" in created.failure("test_data[1]")
    assert len(read_files(pair.marked)) == 9

    pair.write("value", "second")
    regenerated = run_both(pair, "--force-regen", workers=("-n1",)).failure("TestFiles.test_text")
    assert "Files differ and --force-regen set, regenerating file" in regenerated
    pair.write("value", "the third")
    assert run_both(pair, "--regen-all").ret == 0


_DISAGREEING = """
import os
import time
from pathlib import Path

import pytest

first = Path(__file__).with_name("value").read_text() == "first"
pytestmark = pytest.mark.distributed(2)


def test_differs(data_regression, rank):
    data_regression.check({"rank": 0 if first else rank})


@pytest.fixture
def reported(rank):
    file = Path(__file__).with_name("reported")
    yield file
    if rank == 0 and not first:
        file.touch()  # The report of the call has been sent.


def test_dies(reported, data_regression, rank):
    data_regression.check({"first": first})
    if rank == 1 and not first:
        while not reported.exists():
            time.sleep(0.01)
        os._exit(0)


def test_one_rank_uses_it(data_regression, rank):
    if rank == 1:
        data_regression.check({"first": first})
"""


@needs("pytest_regressions")
def test_pytest_regressions_keeps_files_if_ranks_disagree(pair: Pair) -> None:
    """A file is not changed if ranks differ, or if one has not reported."""
    suite = pair.marked
    suite.plugin("pytest_datadir.plugin")
    suite.plugin("pytest_regressions.plugin")
    suite.write("value", "first")
    suite.write("test_ranks.py", _DISAGREEING)
    assert suite.run("--regen-all").ret == 0
    before = read_files(suite)

    suite.write("value", "second")
    regenerated = suite.run("--regen-all")
    assert regenerated.outcomes() == {
        "test_differs": "FAILED",
        "test_dies": "FAILED",
        "test_one_rank_uses_it": "PASSED",
    }
    assert "test_ranks/test_differs.yml differs between ranks" in regenerated.failure("test_differs")
    assert "-rank: 0\n+rank: 1" in regenerated.failure("test_differs")
    assert "test_dies.yml is left as it was: only rank 0 reported" in regenerated.failure("test_dies")
    after = read_files(suite)
    assert {name for name in before if before[name] != after[name]} == {"test_ranks/test_one_rank_uses_it.yml"}

    forced = suite.run("--force-regen", "-k", "differs").failure("test_differs")
    assert "-rank: 0\n+rank: 1" in forced
    assert read_files(suite) == after


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
    assert "-of rank 0\n+of rank 1" in differing.text
    assert read_files(pair.marked).keys() - before.keys() == {"snapshots/test_by_rank/test_differs/alike.txt"}


_INSTA = """
import os
from pathlib import Path

import pytest

VALUE = Path(__file__).with_name("value").read_text()
both = pytest.mark.distributed(2)


@both
def test_text(snapshot):
    assert snapshot() == VALUE
    assert snapshot("same.json") == {"same": [1, 2]}
    assert snapshot("raw.bin") == VALUE.encode() + b"\\xff"


@both
def test_more(snapshot):
    if VALUE == "first":
        assert snapshot("first.txt") == "used once"


@both
def test_one_rank_uses_it(snapshot):
    if os.environ.get("RANK") != "0":
        assert snapshot("one.txt") == VALUE


@both
def test_one_rank_requests_it(request):
    if os.environ.get("RANK", "0") == "0":
        assert request.getfixturevalue("snapshot")("requested.txt") == VALUE


def test_unmarked(snapshot):
    assert snapshot() == VALUE
"""
_INSTA_BY_RANK = """
import pytest

@pytest.mark.distributed(2)
def test_differs(snapshot, rank):
    assert snapshot("alike.txt") == "alike"
    assert snapshot("value.txt") == f"of rank {rank}"
"""


@needs("pytest_insta")
def test_pytest_insta_handles_marked_tests_like_unmarked_ones(pair: Pair) -> None:
    """Snapshots are created, compared, updated and deleted as for unmarked tests. The plugin does not support xdist."""
    pair.plugin("pytest_insta.plugin")
    pair.write("value", "first")
    pair.write("test_files.py", _INSTA)
    created = run_both(pair, "--insta=update-new")
    assert created.ret == 0
    assert len(re.findall("^CREATE snapshots/", created.text, re.MULTILINE)) == 7
    assert {name for name in read_files(pair.marked) if name.startswith("snapshots")} == set(
        re.findall("^CREATE (snapshots/.*)$", created.text, re.MULTILINE)
    )
    pair.write("value", "second")
    assert run_both(pair).result("test_text") == "FAILED"
    updated = run_both(pair, "--insta=update")
    assert updated.ret == 0
    assert re.findall("^(UPDATE|DELETE) (.*)$", updated.text, re.MULTILINE) == [
        ("UPDATE", "snapshots/files__one_rank_requests_it__requested.txt"),
        ("UPDATE", "snapshots/files__one_rank_uses_it__one.txt"),
        ("UPDATE", "snapshots/files__text__0.txt"),
        ("UPDATE", "snapshots/files__text__raw.bin"),
        ("UPDATE", "snapshots/files__unmarked__0.txt"),
        ("DELETE", "snapshots/files__more__first.txt"),
    ]
    before = read_files(pair.marked)
    pair.marked.write("test_by_rank.py", _INSTA_BY_RANK)
    assert "-of rank 0\n+of rank 1" in pair.marked.run("--insta=update", "test_by_rank.py").text
    assert read_files(pair.marked).keys() - before.keys() == {"snapshots/by_rank__differs__alike.txt"}


_APPROVALS = """
from pathlib import Path

import pytest
from approvaltests import verify, verify_as_json, verify_binary

VALUE = Path(__file__).with_name("value").read_text()
both = pytest.mark.distributed(2)


@both
def test_text():
    verify(VALUE)


@both
def test_json():
    verify_as_json({"same": [1, 2]})


@both
def test_bytes():
    verify_binary(VALUE.encode() + b"\\xff", ".raw")


@both
def test_twice():
    verify("same")
    verify("same")


def test_unmarked():
    verify(VALUE)
"""
_APPROVALS_BY_RANK = """
import pytest
from approvaltests import verify

def test_unmarked():
    verify("same")

@pytest.mark.distributed(2)
def test_differs(rank):
    from approvaltests.internals.logs.approved_file_log import ApprovedFilesLog

    ApprovedFilesLog.clear_log_file()  # As a process does that imports it now.
    verify(f"of rank {rank}")
"""


def _approval_logs(suite: Suite) -> list[str]:
    """Return the lines of the logs that approvaltests' scripts for approval and cleanup read."""
    texts = [path.read_text() for path in sorted(suite.path.glob(".approval_tests_temp/.*.log"))]
    return [line for text in texts for line in sorted(text.replace(str(suite.path), "").splitlines())]


@needs("approvaltests", "pytest_approvaltests")
def test_approvaltests_handles_marked_tests_like_unmarked_ones(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are received, and approved by a reporter, as for unmarked tests, with and without xdist."""
    monkeypatch.setenv("APPROVALTESTS_DISABLE_SCRIPT_DOWNLOADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    pair.plugin("approvaltests.integrations.pytest.pytest_plugin", "pytest_approvaltests")
    pair.write("value", "first")
    pair.write("tests/test_files.py", _APPROVALS.replace("with_name", "parent.with_name"))
    received = run_both(pair, "--approvaltests-add-reporter=true")
    assert "Approval Mismatch, received != approved" in received.failure("test_text")
    assert _approval_logs(pair.marked) == _approval_logs(pair.plain)
    for suite in (pair.plain, pair.marked):
        for path in suite.path.rglob("*.received.*"):
            path.replace(path.with_name(path.name.replace(".received.", ".approved.")))
    pair.write("tests/test_files.test_text.received.txt", "of an earlier run")
    assert run_both(pair, workers=("-n1",)).outcomes() == dict.fromkeys(received.outcomes(), "PASSED") | {
        "test_twice": "FAILED"
    }
    assert not list(pair.marked.path.rglob("*.received.*"))
    pair.marked.write("tests/test_by_rank.py", _APPROVALS_BY_RANK)
    before = read_files(pair.marked)
    failure = pair.marked.run("tests/test_by_rank.py").failure("test_differs")
    assert "-of rank 0\n+of rank 1" in failure
    created = read_files(pair.marked).keys() - before.keys()
    assert [name for name in created if "received" in name] == ["tests/test_by_rank.test_unmarked.received.txt"]
    assert {line.rpartition("/")[2] for line in _approval_logs(pair.marked) if "->" not in line} == {
        "test_by_rank.test_unmarked.approved.txt",
        "test_by_rank.test_differs.approved.txt",
    }
