"""Tests of sessions on a Ray cluster of two machines: network namespaces with different host names."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.background_suite import PYTEST, BackgroundSuite
from tests.conftest import Surroundings
from tests.core_verdicts import TESTS, VERDICTS
from tests.features.ray.ray_machines import StartedNode, needs_ray, start_node
from tests.machines import ADDRESSES, Machines, machines
from tests.run import CAUSES

pytestmark = [pytest.mark.long, needs_ray]

_PORT = 6379


@pytest.fixture
def suite(suite: BackgroundSuite) -> BackgroundSuite:
    """Return a suite for simulated devices."""
    suite.write("pytest.ini", "[pytest]\naccel = sim:2\nfilterwarnings = error\n")
    return suite


@pytest.fixture
def two_machines(surroundings: Surroundings) -> Iterator[Machines]:
    """Yield two machines, each with a node of a Ray cluster. The far machine has two GPUs, the near one none."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Ray makes sockets there. Their paths must be short.
    nodes: list[StartedNode] = []
    try:
        with machines(folder) as made:
            head = (
                "--head",
                f"--port={_PORT}",
                "--include-dashboard=false",
                "--num-gpus=0",
                f"--temp-dir={folder}/ray",
            )
            far = (f"--address={ADDRESSES[0]}:{_PORT}", "--num-gpus=2")
            try:
                for number, options in enumerate((head, far)):
                    environment = {**os.environ, **surroundings.environment, "RAY_TMPDIR": str(folder / str(number))}
                    # The far machine does not share memory with the near one.
                    on = made.on(number, private=("/dev/shm",) if number else ())
                    nodes.append(start_node(folder, ADDRESSES[number], number, environment, options, on))
                    nodes[-1].wait_ready()
                yield made
            finally:
                for node in reversed(nodes):
                    node.kill()
    finally:
        shutil.rmtree(folder)


def test_tests_run_on_both_machines_with_the_core_verdicts(suite: BackgroundSuite, two_machines: Machines) -> None:
    suite.write("test_it.py", TESTS)
    suite.write(
        "test_places.py",
        """
        import platform

        import pytest
        import torch
        import torch.distributed as dist


        @pytest.mark.distributed(2)
        def test_far(gather):
            assert gather(platform.node()) == ["far-node"] * 2


        @pytest.mark.distributed(2, nodes=2, kind="cpu")
        def test_both(gather, shared_tmp_path, rank):
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 2
            assert sorted(gather(platform.node())) == ["far-node", "near-node"]
            (shared_tmp_path / str(rank)).touch()
            dist.barrier()
            assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["0", "1"]


        @pytest.mark.distributed(2)
        def test_fails_far(rank):
            assert rank == 0


        def test_near():
            assert platform.node() == "near-node"
        """,
    )
    on_their_places = {"test_far": "PASSED", "test_both": "PASSED", "test_fails_far": "FAILED", "test_near": "PASSED"}
    options = ("--accel-cluster", f"ray:{ADDRESSES[0]}:{_PORT}", CAUSES)
    session = suite.start(*options, program=(*two_machines.on(0), *PYTEST))
    session.finish().expect({**VERDICTS, **on_their_places})
