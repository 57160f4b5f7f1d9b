"""Two recorded sessions, one of them with xdist, at which several tests look: record, page, summary and trace."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from filelock import FileLock

from pytest_accel import read_record
from pytest_accel.features.record.record_file import Event, RecordFile
from pytest_accel.features.record.timeline import Session, TestRun, sessions_of
from tests.features.conftest import Suite, session_server, suite

__all__ = ["Recorded", "no_xdist", "session_server", "suite", "two_workers"]

TESTS = """
    import os

    import pytest

    @pytest.fixture
    def broken():
        raise RuntimeError("no fixture")

    @pytest.mark.distributed(2)
    @pytest.mark.parametrize("number", range(3))
    def test_ranks(number):
        import torch
        import torch.distributed as dist

        dist.barrier()
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)

    @pytest.mark.distributed(2)
    def test_one_rank_fails(rank):
        import torch.distributed as dist

        print("hello from", rank)
        dist.barrier()
        assert rank == 0

    @pytest.mark.distributed(2)
    def test_one_rank_ends(rank):
        if rank == 1:
            os._exit(3)

    @pytest.mark.devices(4)
    def test_all_devices(devices): pass

    @pytest.mark.devices(share=0.25)
    @pytest.mark.parametrize("number", range(2))
    def test_share(device, number): pass

    @pytest.mark.devices(9)
    def test_too_many(): pass

    @pytest.mark.distributed(2, kind="cpu")
    def test_on_cpu(): pass

    @pytest.mark.devices
    def test_errs(broken): pass

    @pytest.mark.devices
    @pytest.mark.xfail(reason="known")
    def test_xfails(): assert False

    @pytest.mark.xfail
    def test_xpasses(): pass

    def test_skips(): pytest.skip("of its own accord")

    @pytest.mark.xfail(run=False, reason="would segfault")
    def test_never_runs(): pass

    @pytest.mark.xfail
    def test_never_gets_there(broken): pass

    @pytest.mark.devices(9)
    @pytest.mark.skip(reason="not for want of hardware")
    def test_is_skipped(): pass

    def test_removed(): pass

    def test_left_out(): pass

    def test_plain(request):
        request.node.user_properties += [(7, 1), ([], 1)]  # pytest accepts names that are no strings.
    """
CONFTEST = """
    def pytest_collection_modifyitems(items):
        # Reported to nobody, as some plugins do it.
        items[:] = [item for item in items if item.name != "test_removed"]
    """
VERDICTS = {
    **dict.fromkeys(("test_ranks[0]", "test_ranks[1]", "test_ranks[2]", "test_share[0]", "test_share[1]"), "passed"),
    **dict.fromkeys(("test_all_devices", "test_on_cpu", "test_plain"), "passed"),
    **dict.fromkeys(("test_one_rank_fails", "test_one_rank_ends"), "failed"),
    **dict.fromkeys(("test_too_many", "test_skips", "test_is_skipped"), "skipped"),
    **dict.fromkeys(("test_xfails", "test_never_runs", "test_never_gets_there"), "xfailed"),
    "test_errs": "error",
    "test_xpasses": "xpassed",
}


Written = tuple[float, str, dict[str, Any]]
"""Time, name and fields of an event that a test writes."""


def write_events(path: Path, *events: Written, **fields: Any) -> str:
    """Write the record of a session with `events` and return its path. `fields` are those of its first event."""
    file = RecordFile(str(path))
    first: Written = (0.0, "SessionStarted", {"schema": 2, "root": "/suite", **fields})
    for at, event, others in [first, *events]:
        file(event, **{"at": at, **others})
    file.close()
    return str(path)


def ran(test: str, outcome: str, at: float = 1.0, stop: float | None = None, **fields: object) -> list[Written]:
    """Return the events of a test with this outcome of its call, or of its setup if it was skipped."""
    end = at if stop is None else stop
    when = "setup" if outcome == "skipped" else "call"
    called = {"test": test, "when": when, "outcome": outcome, "start": at, "stop": end, **fields}
    torn_down = {"test": test, "when": "teardown", "outcome": "passed", "start": end, "stop": end}
    return [(end, "PhaseReported", called), (end, "PhaseReported", torn_down)]


@dataclass(frozen=True)
class Recorded:
    """A session in a job of GitHub, and the files that it has written to `folder`."""

    folder: Path
    text: str
    """Its output."""

    @property
    def record(self) -> list[Event]:
        """The events of ``record.jsonl``."""
        return read_record(self.folder / "record.jsonl")

    @property
    def session(self) -> Session:
        (session,) = sessions_of([self.record])
        return session

    @property
    def tests(self) -> dict[str, TestRun]:
        """The runs of tests by their names."""
        return {run.test.partition("::")[2]: run for run in self.session.tests}

    @property
    def junit(self) -> ElementTree.Element:
        return ElementTree.parse(self.folder / "junit.xml").getroot()[0]

    def line(self, text: str) -> int:
        """Return the number of the line of the test file that has `text`."""
        lines = (self.folder.parent / "sub" / "test_it.py").read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.fixture
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder that all processes of this session have in common."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def _run(option: str, suite: Suite, monkeypatch: pytest.MonkeyPatch, shared: Path) -> Recorded:
    """Run the session with `option`, unless a test of this or of another process has run it."""
    done = shared / f"recorded{option}.json"
    with FileLock(done.with_suffix(".lock")):
        if not done.exists():
            suite.write("sub/test_it.py", TESTS)
            suite.write("conftest.py", CONFTEST)
            name = f"files{option}"
            summary = suite.write(f"{name}/summary.md", "An earlier step.")
            monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
            monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)  # It marks a session that a test has started.
            files = [f"--accel-record={name}/record.jsonl", f"--junitxml={name}/junit.xml"]
            run = suite.run(*files, f"--accel-report={name}/report.html", "-k", "not left_out", *filter(None, [option]))
            done.write_text(json.dumps([str(summary.parent), run.text]))
        folder, text = json.loads(done.read_text())
    return Recorded(Path(folder), text)


@pytest.fixture
def no_xdist(suite: Suite, monkeypatch: pytest.MonkeyPatch, shared_folder: Path) -> Recorded:
    """Provide the session of one process."""
    return _run("", suite, monkeypatch, shared_folder)


@pytest.fixture
def two_workers(suite: Suite, monkeypatch: pytest.MonkeyPatch, shared_folder: Path) -> Recorded:
    """Provide the session of two workers of xdist."""
    return _run("-n2", suite, monkeypatch, shared_folder)
