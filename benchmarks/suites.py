"""The test suites of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import STAMPS
from pytest_accel.core.processes import MARK

CONFTEST = f"""
import json, os, sys, time
import pytest

begins, ends, processor, collecting, collected = [], [], [], 0.0, 0.0

@pytest.hookimpl(tryfirst=True)
def pytest_collection():
    global collecting
    collecting = time.monotonic()

def pytest_collection_finish():
    global collected
    collected = time.monotonic()

def pytest_runtest_logstart():
    begins.append(time.monotonic())

def pytest_runtest_logfinish():
    ends.append(time.monotonic())
    processor.append(time.process_time())

# Not pytest_runtest_logreport: with a hook between setup and call, ranks wait for the driver before the call.
def pytest_sessionfinish(session):
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if terminal is None else terminal.stats.get("skipped", [])
    rank = f".{{os.environ['RANK']}}" if "{MARK}" in os.environ and "RANK" in os.environ else ""
    with open(os.environ["{STAMPS}"] + rank, "w") as file:
        json.dump(
            {{
                "collecting": collecting,
                "collected": collected,
                "begins": begins,
                "ends": ends,
                "processor": processor,
                "skipped": [f"{{report.nodeid}}: {{report.longreprtext}}" for report in skipped],
                "torch": "torch" in sys.modules,
            }},
            file,
        )
"""
"""The conftest of every suite, which records the measured times, in a rank in a file of its own."""

IMPORTS = """import pytest
import torch
import torch.distributed as dist

"""

PLAIN = """
def test_{number}():
    values = torch.ones(4)
    assert (values + values).sum().item() == 8
"""

TRIVIAL = """
def test_{number}():
    assert {number} >= 0
"""


def all_reduce(mark: str | None) -> str:
    """Return the text of a test with an all-reduce. `mark` has the arguments of the mark ``distributed``."""
    decorator = f"@pytest.mark.distributed({mark})" if mark else ""
    return f"""
{decorator}
def test_{{number}}(rank, world_size):
    values = torch.full((4,), rank + 1.0)
    dist.all_reduce(values)
    assert values[0].item() == world_size * (world_size + 1) / 2
"""


GROUP = f"""
import torch.distributed as dist

if int(os.environ["RANK"]) > 0:
    os.environ["{STAMPS}"] = os.devnull

@pytest.fixture(scope="session", autouse=True)
def group():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()

@pytest.fixture
def rank():
    return dist.get_rank()

@pytest.fixture
def world_size():
    return dist.get_world_size()
"""
"""Text to append to `CONFTEST` for a suite that runs under ``torchrun -m pytest`` without the plugin: it creates the
process group and provides the fixtures."""

# Head and test of a suite of torch's `MultiProcContinuousTest`, whose tests share their processes.
CONTINUOUS = (
    """import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest


class TestAllReduce(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"
""",
    """
    def test_{number}(self):
        values = torch.full((4,), self.rank + 1.0)
        dist.all_reduce(values)
        assert values[0].item() == 3
""",
)

# Head and test of a suite of torch's `MultiProcessTestCase`, which starts processes for each test.
PROCESSES = (
    """import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase


class TestAllReduce(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()
""",
    """
    def test_{number}(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        values = torch.full((4,), self.rank + 1.0)
        dist.all_reduce(values)
        assert values[0].item() == 3
        dist.destroy_process_group()
""",
)

# Head and test of a suite that spawns two ranks in each test.
SPAWNING = (
    """import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def all_reduce(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    values = torch.full((4,), rank + 1.0)
    dist.all_reduce(values)
    assert values[0].item() == 3
    dist.destroy_process_group()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
""",
    """

def test_{number}():
    mp.spawn(all_reduce, args=(free_port(),), nprocs=2)
""",
)

_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
values = torch.full((4,), dist.get_rank() + 1.0)
dist.all_reduce(values)
assert values[0].item() == 3
dist.destroy_process_group()
"""

ALL_REDUCE = """
import time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
for count in (500, 3000):  # The first ones find the group cold.
    began = time.monotonic()
    for _ in range(count):
        values = torch.full((4,), dist.get_rank() + 1.0)
        dist.all_reduce(values)
        assert values[0].item() == 3
    took = time.monotonic() - began
if dist.get_rank() == 0:
    print(took / count * 1e3)
dist.destroy_process_group()
"""
"""A script that prints the milliseconds of an all-reduce in processes that do nothing else."""

# Head and test of a suite in which each test runs a script under torchrun.
TORCHRUN = (
    f"""import subprocess
import sys

SCRIPT = {_SCRIPT!r}
""",
    """
def test_{number}(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        check=True,
        capture_output=True,
    )
""",
)


def write(
    folder: Path,
    body: str,
    tests: int,
    *,
    head: str = IMPORTS,
    files: int = 1,
    imported: Sequence[str] = (),
    conftest: str = "",
) -> Path:
    """Write a suite of `tests` tests in `files` files of equal length; `body` gets the number of each test.

    Its conftest imports the modules `imported` before the tests are collected, and ends with the text `conftest`.
    """
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text("".join(f"import {name}\n" for name in imported) + CONFTEST + conftest)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for file in range(files):
        numbers = range(file * tests // files, (file + 1) * tests // files)
        (folder / f"test_{file}.py").write_text(head + "".join(body.format(number=number) for number in numbers))
    return folder
