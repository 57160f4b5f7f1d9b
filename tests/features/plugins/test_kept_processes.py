"""Tests of processes that a library keeps running after a test: they are no leak, and end with their rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deadline import eventually
from tests.features.conftest import Suite
from tests.features.plugins.conftest import needs

_WANDB = """
    import os

    import psutil
    import pytest
    import wandb

    PIDS = set()

    def cores():
        return {child.pid for child in psutil.Process().children() if "wandb-core" in " ".join(child.cmdline())}

    @pytest.mark.distributed(2, kind="cpu")
    @pytest.mark.parametrize("number", [0, 1])
    def test_logs(tmp_path, number):
        PIDS.update(cores())
        with wandb.init(project="p", dir=tmp_path, settings=wandb.Settings(silent=True)) as run:
            run.log({"loss": 1.0})
        assert len(cores()) == 1
        assert PIDS == (cores() if number else set())
    """
_JOBLIB = """
    import os

    import joblib
    import psutil
    import pytest

    PIDS = set()
    pytestmark = pytest.mark.distributed(2, kind="cpu")

    def workers():
        used = set(joblib.Parallel(n_jobs=2, batch_size=1)(joblib.delayed(os.getpid)() for _ in range(8)))
        running = {child.pid for child in psutil.Process().children() if "popen_loky" in " ".join(child.cmdline())}
        assert used <= running
        return running  # A slow worker may have got no task.

    def test_starts_workers(): PIDS.update(workers())

    def test_has_them_still():
        assert PIDS
        assert PIDS <= workers()

    def test_dies(rank):
        if rank == 1:
            os._exit(3)
    """


@needs("wandb", "joblib")
def test_processes_of_wandb_and_joblib_are_no_leak(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    suite.write("test_joblib.py", _JOBLIB)
    suite.write("test_wandb.py", _WANDB)
    before = _loky_files()
    run = suite.run("-o", "accel_leaks=fail", "-W", "default")
    assert run.outcomes() == dict.fromkeys(run.outcomes(), "PASSED") | {"test_dies": "FAILED"}, run.text
    assert len(run.outcomes()) == 2 + 3
    eventually("loky's resource tracker to remove its files", lambda: not _loky_files() - before)


def _loky_files() -> set[str]:
    """Return the names of loky's and joblib's files in shared memory, which loky's resource tracker removes."""
    folder = Path("/dev/shm")
    return {name for name in os.listdir(folder) if "loky" in name or "joblib" in name} if folder.is_dir() else set()
