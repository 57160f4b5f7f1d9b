"""Tests of what tests and libraries leave on a rank's devices: workspaces, memory of failed tests, errors.

The devices are simulated at torch's boundary: the functions of `torch.cuda` that the plugin calls are replaced.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.features.conftest import Suite
from tests.installed_packages import InstalledPackages
from tests.run import Run

_KIND = """
from collections import Counter
from dataclasses import replace

from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.vendors.sim import Sim

GIB = 1 << 30
WORKSPACE = 65 << 20


class Block:
    \"\"\"A tensor on the device.\"\"\"

    def __init__(self, card, size):
        self.card, self.size = card, size
        card.allocated += size
        card.reserved = max(card.reserved, card.allocated)

    def __del__(self):
        self.card.allocated -= self.size


class Card:
    \"\"\"A device of 16 GiB in this process, as torch shows it.\"\"\"

    def __init__(self):
        self.allocated = self.reserved = 0
        self.workspace = None
        self.pools = [(0, 0)]
        self.calls = Counter()
        self.errors = {}

    def install(self, torch):
        cuda = torch.cuda
        cuda.card = self
        cuda.is_initialized = lambda: True
        cuda.set_device = lambda device: None
        cuda.set_per_process_memory_fraction = lambda fraction, device: None
        cuda.memory_allocated = lambda device: self.allocated
        cuda.memory_reserved = lambda device: self.reserved
        cuda.max_memory_allocated = lambda device: self.reserved
        cuda.reset_peak_memory_stats = lambda device: None
        cuda.memory_snapshot = lambda: [{"segment_pool_id": pool} for pool in self.pools]
        cuda.synchronize = self.synchronize
        cuda.empty_cache = self.empty_cache
        torch._C._cuda_clearCublasWorkspaces = self.clear_workspaces

    def multiply(self):
        \"\"\"Do what needs a workspace.\"\"\"
        self.workspace = self.workspace or Block(self, WORKSPACE)

    def clear_workspaces(self):
        self.calls["clear"] += 1
        self.workspace = None

    def empty_cache(self):
        self.calls["empty"] += 1
        self.reserved = self.allocated

    def fail(self, device, text="device-side assert triggered"):
        \"\"\"Start work that fails, and makes `device` unusable for this process.\"\"\"
        self.errors.setdefault(str(device), f"CUDA error: {text}\\nCUDA kernel errors might be reported later")

    def synchronize(self, device="cuda:0"):
        import torch

        if str(device) in self.errors:
            raise torch.AcceleratorError(self.errors[str(device)])


class Fake(Sim):
    def discover(self):
        return tuple(replace(device, kind="fake", memory=16 * GIB) for device in super().discover())

    def verify(self, devices, environ):
        import torch

        super().verify(devices, environ)
        Card().install(torch)


def make(argument):
    return Fake(KINDS["sim"]._replace(name="fake", torch="cuda", torch_index="mask"), argument)
"""


@pytest.fixture
def fake(suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Provide a suite whose sessions can have devices of kind `fake`."""
    packages = InstalledPackages(tmp_path / "packages", monkeypatch)
    packages.install_vendor("fake-accel", "fake = fake_accel:make", "fake_accel", _KIND)
    return suite


_MEMORY = """
import os
import sys

import pytest
from tests.inner import note
from tests.lazy_torch import torch
from fake_accel import GIB, Block

pytestmark = pytest.mark.devices(1)
KEPT = []


@pytest.fixture
def card():
    return torch.cuda.card


def test_backward(card):
    note("ranks", "backward", os.getpid())
    card.multiply()


def test_nothing(card):
    note("ranks", "nothing", os.getpid())
    assert card.calls == {"clear": 1}


def test_small(card):
    Block(card, GIB)


def test_keeps_its_cache(card):
    note("ranks", "cached", os.getpid())
    assert card.reserved == GIB
    assert "empty" not in card.calls


def test_fails_with_a_full_card(card):
    kept = [Block(card, 12 * GIB)]
    raise MemoryError("CUDA out of memory")


def test_finds_the_card_empty(card):
    note("ranks", "failed", os.getpid())
    assert card.allocated == 0
    assert not hasattr(sys, "last_value")


def test_captures_a_graph(card):
    note("ranks", "before-graph", os.getpid())
    card.pools.append((0, 1))
    card.multiply()


def test_leaks(card):
    note("ranks", "after-graph", os.getpid())
    assert not card.calls
    KEPT.append(Block(card, 16 * GIB))


@pytest.fixture(scope="class")
def engine():
    yield (blocks := [Block(torch.cuda.card, GIB)])
    blocks.clear()


class TestEngine:
    def test_fills_the_cache_of_its_fixture(self, card, engine):
        note("ranks", "engine", os.getpid())
        engine.append(Block(card, 2 * GIB))

    def test_finds_it_filled(self, card, engine):
        note("ranks", "last", os.getpid())
        assert card.allocated == 3 * GIB


def test_at_last(card):
    note("ranks", "last", os.getpid())
    assert card.allocated == 0
"""


def _check_memory(run: Run, ranks: dict[str, str]) -> None:
    """Check the results of `_MEMORY`; `ranks` has the process of each test."""
    # Neither a workspace nor a failed test costs the rank.
    names = ["backward", "nothing", "cached", "failed", "before-graph"]
    assert len({ranks[name] for name in names}) == 1
    assert len({ranks[name] for name in ("before-graph", "after-graph", "engine")}) == 3
    assert ranks["engine"] == ranks["last"]
    # A graph may use the workspace, which is therefore not cleared.
    assert "left 65 MiB more allocated on cuda:0 than it had found" in run.failure("test_captures_a_graph")
    assert "left 16384 MiB more allocated on cuda:0 than it had found" in run.failure("test_leaks")


_WORLDS = """
import pytest
from tests.lazy_torch import torch
from fake_accel import GIB, Block


@pytest.mark.devices(1)
def test_before_a_test_of_another_key():
    Block(torch.cuda.card, GIB)


@pytest.mark.distributed(1, kind="cpu")
def test_of_another_key():
    pass


@pytest.mark.devices(1)
def test_of_the_first_key(launch):
    card = torch.cuda.card
    assert (card.reserved, card.calls["empty"]) == (0, 1)
    Block(card, GIB)
    launch("script.py", launcher="python")
    assert (card.reserved, card.calls["empty"]) == (0, 2)
"""


_ERRORS = """
import os

import pytest
from tests.inner import note
from tests.lazy_torch import torch

pytestmark = pytest.mark.devices(2)


def test_begins():
    note("ranks", "begins", os.getpid())


def test_expects(devices):
    note("ranks", "expects", os.getpid())
    torch.cuda.card.fail(devices[1])
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.cuda.synchronize(devices[1])


def test_after():
    note("ranks", "new", os.getpid())


def test_does_not_wait(devices):
    torch.cuda.card.fail(devices[0])


def test_fails_because_of_it(devices):
    torch.cuda.card.fail(devices[0])
    torch.cuda.synchronize(devices[0])


def test_expects_one_of_two(devices):
    torch.cuda.card.fail(devices[0])
    torch.cuda.card.fail(devices[1], "an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.cuda.synchronize(devices[0])


def test_expects_another(devices):
    with pytest.raises(torch.AcceleratorError):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    torch.cuda.card.fail(devices[0])


@pytest.fixture
def expects_in_teardown(devices):
    yield
    torch.cuda.card.fail(devices[0])
    with pytest.raises(RuntimeError):
        torch.cuda.synchronize(devices[0])


def test_with_fixture(expects_in_teardown):
    pass


def test_ends():
    note("ranks", "ends", os.getpid())
"""


def _check_errors(run: Run, ranks: dict[str, str]) -> None:
    """Check the results of `_ERRORS`; `ranks` has the process of each test."""
    assert ranks["begins"] == ranks["expects"]
    assert len({ranks[name] for name in ("expects", "new", "ends")}) == 3
    text = run.failure("test_does_not_wait")
    assert "RuntimeError: work that the test started on cuda:0 has failed: CUDA error: device-side assert" in text
    assert "the place in the code is unknown" in text
    assert "traceback entries" not in run.text
    assert "on cuda:1 has failed: CUDA error: an illegal memory access" in run.failure("test_expects_one_of_two")
    _, title, rest = run.text.partition("accel: tests after which new ranks were started")
    why = "the test expected an error of a device, which is unusable now"
    assert title, run.text
    lines = [line for line in rest.partition("\n===")[0].splitlines() if line.startswith("test_errors.py::")]
    assert lines == [
        f"test_errors.py::test_expects: {why}: cuda:1: CUDA error: device-side assert triggered",
        f"test_errors.py::test_with_fixture: {why}: cuda:0: CUDA error: device-side assert triggered",
    ]


def test_memory_and_errors_that_a_test_leaves_on_a_device(fake: Suite) -> None:
    """The cache is also emptied for worlds with another key, and for launched scripts."""
    fake.write("test_errors.py", _ERRORS)
    fake.write("test_memory.py", _MEMORY)
    fake.write("test_1_worlds.py", _WORLDS)  # It needs ranks without an emptied cache.
    fake.write("script.py", "")
    run = fake.run("--accel=fake:2", "--tb=short", "-o", "accel_schedule=off")
    outcomes = run.outcomes()
    failed = ["test_does_not_wait", "test_fails_because_of_it", "test_expects_one_of_two", "test_expects_another"]
    expected = dict.fromkeys([*failed, "test_fails_with_a_full_card"], "FAILED")
    expected |= dict.fromkeys(["test_captures_a_graph", "test_leaks"], "PASSED ERROR")
    run.expect(dict.fromkeys(outcomes, "PASSED") | expected)
    ranks = dict(line.split() for line in fake.read("ranks"))
    _check_errors(run, ranks)
    _check_memory(run, ranks)
