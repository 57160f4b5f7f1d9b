"""Tests of shared memory: the files that ranks leave are removed when their world ends, and no other files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.background_suite import BackgroundSuite

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a folder of shared memory")

HEAD = """
import ctypes
import mmap
import os
import tempfile
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

RUN = "RUN_ID"
LIBC = ctypes.CDLL(None, use_errno=True)
HELD = []


def share(name):
    # As a C++ extension does it, of which Python knows nothing; DeepSpeed's has the world's port in its names.
    descriptor = LIBC.shm_open(f"{RUN}_{name}".encode(), os.O_CREAT | os.O_RDWR, 0o600)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    os.ftruncate(descriptor, 1 << 16)
    HELD.append((descriptor, mmap.mmap(descriptor, 1 << 16)))


def left(name):
    return [one for one in os.listdir("/dev/shm") if one.startswith(f"{RUN}_{name}")]


def is_seen(name):
    notes = Path(tempfile.gettempdir()).glob("accel-*/shared-memory-*")
    return f"{RUN}_{name}" in "".join(note.read_text() for note in notes)


def eventually(look):
    deadline = time.monotonic() + 30
    while not look():
        assert time.monotonic() < deadline, left("")
        time.sleep(0.02)

"""


def test_files_are_removed_with_the_world_that_created_them(suite: BackgroundSuite) -> None:
    suite.write(
        "conftest.py",
        """
        import os
        import time
        from pathlib import Path

        if "WORLD_SIZE" in os.environ:

            def pytest_sessionfinish():
                # The ranks of `test_is_retired` keep their files open until this session uses one of them.
                while not Path(__file__).with_name("session_uses_it").exists():
                    time.sleep(0.02)
        """,
    )
    (suite.path / "test_it.py").write_text(
        HEAD.replace("RUN_ID", suite.run_id)
        + """
def test_session_makes_its_own():
    share("mine")
    share("used_by_ranks")


@pytest.mark.distributed(2, fresh=True)
def test_is_retired(rank):
    share(f"retired_{os.environ['MASTER_PORT']}_{rank}")
    share("used_by_ranks")
    share("used_by_session")
    dist.barrier()
    eventually(lambda: is_seen("used_by_session"))


def test_session_uses_what_ranks_made():
    share("used_by_session")
    Path(__file__).with_name("session_uses_it").touch()
    share("mine_too")


@pytest.mark.distributed(2)
def test_stays(rank):
    share(f"stays_{rank}")
    dist.barrier()
    eventually(lambda: len(left("stays")) == 2)


@pytest.mark.distributed(2)
def test_is_replaced(rank):
    assert len(left("stays")) == 2
    threading.Thread(target=threading.Event().wait).start()


@pytest.mark.distributed(2)
def test_dies(rank):
    share(f"dies_{rank}")
    dist.barrier()
    eventually(lambda: is_seen("dies_1"))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_only_what_ranks_made_has_been_removed():
    for name in ("retired", "stays", "dies"):
        eventually(lambda: not left(name))
    assert len(left("")) == 4, left("")
    for name in ("mine", "mine_too", "used_by_ranks", "used_by_session"):
        os.unlink(f"/dev/shm/{RUN}_{name}")


def kill_server(rank, name):
    share(f"{name}_{rank}")
    dist.barrier()
    eventually(lambda: is_seen(f"{name}_0") and is_seen(f"{name}_1"))
    if rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


# The first fork server is a copy, whose parent removes the files. The second is not a copy.
@pytest.mark.distributed(2)
def test_copied_server_is_killed(rank):
    kill_server(rank, "copy")


def test_orphans_of_the_copy_have_been_removed():
    eventually(lambda: not left(""))


@pytest.mark.distributed(2)
def test_server_without_a_copy_is_killed(rank):
    kill_server(rank, "alone")


def test_orphans_have_been_removed():
    eventually(lambda: not left(""))
"""
    )
    run = suite.start("-W", "ignore::pytest_accel.LeftoverWarning").finish(timeout=150)
    passed = dict.fromkeys(run.outcomes(), "PASSED")
    failed = ("test_dies", "test_copied_server_is_killed", "test_server_without_a_copy_is_killed")
    run.expect(passed | dict.fromkeys(failed, "FAILED"))
    assert len(passed) == 11
