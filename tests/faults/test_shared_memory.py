"""Tests of shared memory: only what the libraries' own programs clean up is removed, and the rest is named."""

from __future__ import annotations

import os
import sys

import pytest

from tests.background_suite import BackgroundSuite

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a folder of shared memory")

SUITE = """
import ctypes
import mmap
import os
import signal
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from tests.lazy_torch import torch

RUN = "RUN_ID"
LIBC = ctypes.CDLL(None, use_errno=True)
HELD = []


def share(name):
    # A C++ extension does the same without Python's knowledge.
    descriptor = LIBC.shm_open(f"{RUN}_{name}".encode(), os.O_CREAT | os.O_RDWR, 0o600)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    os.ftruncate(descriptor, 4096)
    return descriptor, mmap.mmap(descriptor, 4096)


@pytest.mark.xfail
@pytest.mark.distributed(2)
def test_dies(rank, gather):
    HELD.append(share(f"made_{rank}"))
    HELD.append(shared_memory.SharedMemory(create=True, size=4096, name=f"{RUN}_tracked_{rank}"))
    torch.multiprocessing.set_sharing_strategy("file_system")
    HELD.append(torch.zeros(1000).share_memory_())
    name = f"torch_{os.getpid()}_"
    assert any(one.startswith(name) for one in os.listdir("/dev/shm"))
    Path(__file__).with_name(f"torch_{rank}").write_text(name)
    gather(None)  # The other rank has come here, too.
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.distributed(2)
def test_retires_and_leaves_a_file(rank):
    share(f"retired_{rank}")
"""


def test_files_that_a_rank_had_open_are_not_removed(suite: BackgroundSuite) -> None:
    (suite.path / "test_it.py").write_text(SUITE.replace("RUN_ID", suite.run_id))
    run = suite.run("-p", "no:randomly", "-W", "ignore::pytest_accel.LeftoverWarning")
    left = {name.removeprefix(f"{suite.run_id}_") for name in os.listdir("/dev/shm") if suite.run_id in name}
    for name in left:
        os.unlink(f"/dev/shm/{suite.run_id}_{name}")
    run.expect(dict.fromkeys(run.outcomes(), "PASSED") | {"test_dies": "XFAIL"})
    assert left == {"made_0", "made_1", "retired_0", "retired_1"}
    torchs = tuple((suite.path / f"torch_{rank}").read_text() for rank in range(2))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(torchs)]
