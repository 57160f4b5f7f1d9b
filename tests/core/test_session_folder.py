"""Tests of the removal of what dead sessions have left, where the machine does not show all processes or end them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_accel.core import kill, session_folder


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a dead session."""
    temporary = tempfile.mkdtemp(dir=tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    monkeypatch.setattr(session_folder, "TEMPORARY", temporary)
    monkeypatch.setattr(session_folder, "_LONGEST_DIRECTORY", 1000)
    folder = Path(session_folder.create())
    session_folder._unclaim_all()
    (folder / "file").touch()
    return folder


def test_a_dead_session_is_left_if_the_ancestors_are_unknown(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(process: psutil.Process) -> list[psutil.Process]:
        raise psutil.NoSuchProcess(1)

    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "parents", vanish)
        session_folder.remove_dead()
    assert (dead / "file").exists()
    session_folder.remove_dead()
    assert not dead.exists()


def test_the_folder_of_a_dead_session_stays_while_its_processes_cannot_be_killed(
    dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []

    def kill_nothing(directory: str, timeout: float, **options: Any) -> tuple[kill.Survivor, ...]:
        timeouts.append(timeout)
        return (kill.Survivor(71, 5.0, "process 71"),)

    with monkeypatch.context() as patch:
        patch.setattr(kill, "kill_marked", kill_nothing)
        assert session_folder.remove_dead() == [kill.Survivor(71, 5.0, "process 71")]
    assert (dead / "session.lock").exists()
    assert max(timeouts) <= session_folder._KILL_TIMEOUT
    assert session_folder.remove_dead() == []
    assert not dead.exists()
