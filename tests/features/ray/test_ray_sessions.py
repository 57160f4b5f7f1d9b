"""Tests of sessions on a real Ray cluster, whose nodes are on this machine and declare GPUs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from pytest_accel.leases.locks import SessionLocks
from pytest_accel.leases.shared_folder import lock_path
from tests.background_suite import BackgroundSession, BackgroundSuite, command_line
from tests.conftest import Surroundings
from tests.core_verdicts import TESTS, VERDICTS
from tests.deadline import eventually
from tests.features.ray.autoscaled_machines import AutoscaledMachines
from tests.features.ray.ray_machines import RayMachines, needs_ray
from tests.run import CAUSES, Run

pytestmark = needs_ray

ENDLESS = """
    import time
    from pathlib import Path

    import pytest


    @pytest.mark.distributed(2)
    def test_endless(rank):
        Path(f"rank-{rank}").write_text(f"{rank}\\n")
        time.sleep(1000)


    @pytest.mark.distributed(2)
    def test_next():
        pass
    """


@contextmanager
def cluster(surroundings: Surroundings, *gpus: int) -> Iterator[RayMachines]:
    """Yield a cluster with one node for each number of GPUs in `gpus`."""
    made = RayMachines({**surroundings.environment, "SET_BY": "node"})
    try:
        for number in gpus:
            made.add(number)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def machines(surroundings: Surroundings) -> Iterator[RayMachines]:
    """Yield a cluster with two nodes of two GPUs each. Tests must not change it."""
    with cluster(surroundings, 2, 2) as made:
        yield made


def start(suite: BackgroundSuite, ray: RayMachines, *args: str) -> BackgroundSession:
    """Start a session on the cluster `ray`."""
    suite.write("pytest.ini", "[pytest]\naccel = sim:2\nfilterwarnings = error\n")
    environment = {"SET_BY": "pytest", "SET_HERE_ONLY": "1"}
    return suite.start("--accel-cluster", f"ray:{ray.address}", *args, environment=environment)


def run(suite: BackgroundSuite, ray: RayMachines, *args: str) -> Run:
    """Run a session on the cluster `ray`, and return its result."""
    return start(suite, ray, *args).finish()


def plugin_processes(surroundings: Surroundings) -> list[psutil.Process]:
    """Return the agents, fork servers and ranks on the nodes."""
    return [process for process in surroundings.processes() if "pytest_accel" in command_line(process)]


def expect_free_nodes(surroundings: Surroundings) -> None:
    """Wait until the plugin has no processes on the nodes."""
    eventually("all processes on the nodes to end", lambda: not plugin_processes(surroundings), timeout=30)


def remove_folders_of_lost_nodes(surroundings: Surroundings) -> None:
    """Remove the folders of agents that were killed and could not remove them."""
    for folder in surroundings.temporary.glob("accel-*"):
        shutil.rmtree(folder)


def test_verdicts_are_the_same_as_on_one_machine(
    suite: BackgroundSuite, machines: RayMachines, surroundings: Surroundings
) -> None:
    suite.write("test_it.py", TESTS)
    result = run(suite, machines, CAUSES, "--accel-log=steps.log")
    result.expect(VERDICTS)
    log = (suite.path / "steps.log").read_text()
    for step in (
        f"Ray client: connects to the Ray cluster: {machines.address}",
        "Ray client: starts the agent of machine 1",
        "agent of machine 1: looks for the controller at ",
        "agent of machine 1: is connected to the controller at ",
        "agent of machine 1: starts fork server 1: process ",
        "fork server 1: has imported what ranks need",
        "agent of machine 1: ends",
        "why='another request waits for its devices'",  # Idle worlds give up their places at once.
    ):
        assert step in log
    assert "accel: sim, 4 devices: 4 x sim; on 3 nodes of a Ray cluster" in result.text
    assert "needs 9 GPU on 1 node; the largest nodes of the Ray cluster: " in result.text
    assert f"--accel-cluster ray:{machines.address}" in result.failure("test_fails_on_one_rank")
    expect_free_nodes(surroundings)


@pytest.mark.long
def test_worlds_span_nodes_and_two_sessions_never_share_a_device(
    suite: BackgroundSuite, machines: RayMachines, surroundings: Surroundings
) -> None:
    suite.write(
        "test_it.py",
        """
        import os
        import time
        from pathlib import Path

        import pytest


        @pytest.mark.distributed(1)
        def test_environment_of_the_node():
            assert (os.environ["SET_BY"], os.environ["SET_HERE_ONLY"]) == ("node", "1")
            # Of Ray's own processes.
            assert "OMP_NUM_THREADS" not in os.environ
            assert not [name for name in os.environ if name.startswith(("RAY_JOB", "RAY_RAYLET", "RAY_LD", "LD_PRE"))]
            assert os.environ.get("PYTHONBREAKPOINT") != "ray.util.rpdb.set_trace"


        @pytest.mark.parametrize("number", range(3))
        @pytest.mark.distributed(2, nodes=2)
        def test_one_rank_a_node(node_rank, rank, number):
            import torch.distributed as dist

            assert node_rank == rank
            dist.barrier()


        @pytest.mark.distributed(4)
        def test_more_than_one_node_has(node_rank, gather):
            assert gather(node_rank) == [0, 0, 1, 1]


        @pytest.mark.parametrize("number", range(6))
        @pytest.mark.devices(2)
        def test_alone(number, devices):
            assert len(devices) == 2
            # Two nodes have devices with the same ids: at most two tests may have them at a time.
            used = [Path(f"in-use-{place}") for place in range(2)]
            for path in used:
                try:
                    path.touch(exist_ok=False)
                    break
                except FileExistsError:
                    continue
            else:
                pytest.fail("more tests run than the cluster has devices for")
            try:
                time.sleep(0.05)
            finally:
                path.unlink()


        @pytest.mark.distributed(4, nodes=4)
        def test_too_many_nodes():
            pass
        """,
    )
    other, session = (start(suite, machines, "-n", workers) for workers in ("2", "auto"))
    for result in (other.finish(), session.finish()):
        outcomes = result.outcomes()
        assert outcomes.pop("test_too_many_nodes") == "SKIPPED"
        assert set(outcomes.values()) == {"PASSED"}, result.text
        assert len(outcomes) == 11
    assert "created: 4/4 workers" in result.text
    assert "4 devices: " in run(suite, machines, "-n", "2", "--accel-plan").text
    expect_free_nodes(surroundings)


@pytest.mark.long
def test_a_test_waits_for_another_session_whose_controller_leaves_no_processes_on_the_nodes_if_it_is_stopped(
    suite: BackgroundSuite, machines: RayMachines, surroundings: Surroundings
) -> None:
    suite.write("test_it.py", ENDLESS)
    session = start(suite, machines)
    suite.read("rank-1")
    assert plugin_processes(surroundings)
    session.process.send_signal(signal.SIGINT)
    assert session.finish().ret == pytest.ExitCode.INTERRUPTED
    expect_free_nodes(surroundings)
    (suite.path / "rank-1").unlink()
    session = start(suite, machines)
    suite.read("rank-1")
    suite.write(
        "test_waits.py",
        """
        import pytest


        @pytest.mark.distributed(4)
        def test_waits():
            pass
        """,
    )
    text = "2 + 2 GPU on 2 nodes of the Ray cluster; 2 of 4 are free"
    for seconds in (1, 10, 60):  # In this time, Ray has to say what is free.
        waits = run(suite, machines, f"--accel-wait={seconds}", "test_waits.py")
        waits.expect({"test_waits": "ERROR"})
        if text in waits.failure("test_waits"):
            break
    assert text in waits.failure("test_waits")
    os.kill(session.process.pid, signal.SIGKILL)
    session.process.communicate()
    expect_free_nodes(surroundings)
    # The devices were returned to Ray.
    suite.write("test_it.py", TESTS)
    assert (
        run(suite, machines, "test_it.py", "-k", "test_two_devices or test_sum").outcomes()["test_sum[1]"] == "PASSED"
    )


@pytest.mark.long
def test_devices_of_a_node_are_locked_against_other_sessions(
    suite: BackgroundSuite, machines: RayMachines, surroundings: Surroundings
) -> None:
    suite.write(
        "test_it.py",
        """
        import os
        from pathlib import Path

        import pytest


        @pytest.mark.devices(2)
        def test_locked(accel):
            for name in accel.ids:
                lock = Path(os.environ["PYTEST_ACCEL_LOCK_DIR"], f"pytest-accel-{name}.lock")
                assert "test_locked" in lock.read_text()
        """,
    )
    wished = lock_path(suite.locks, "sim-1", "wish")
    with contextlib.closing(SessionLocks(suite.locks)) as other:
        assert other.lock("sim-1")
        for seconds in (10, 60):  # In this time, Ray has to assign the node, and the agent to start there.
            waits = run(suite, machines, "--accel=sim:2,shared", f"--accel-wait={seconds}")
            waits.expect({"test_locked": "ERROR"})
            assert f"no devices came free within {seconds} s" in waits.failure("test_locked")
            if wished.exists():
                break
    assert wished.exists(), "Ray had assigned it, and the node waited for its lock"
    run(suite, machines, "--accel=sim:2,shared").expect({"test_locked": "PASSED"})
    expect_free_nodes(surroundings)


@pytest.mark.long
def test_a_world_whose_machine_is_lost_before_it_has_started_is_started_once_more(
    suite: BackgroundSuite, machines: RayMachines, surroundings: Surroundings
) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest

        pytestmark = pytest.mark.distributed(2)

        def test_lost_twice(): ...

        def test_next(): ...
        """,
    )
    # A fork server can start ranks once it has imported this.
    suite.write("slow.py", f"from tests.inner import wait_for\n\nwait_for({str(suite.path / 'both-are-lost')!r})\n")
    session = start(suite, machines, "--accel-log=steps.log", "-o", "accel_preload=slow")
    log = suite.path / "steps.log"
    for number in (1, 2):
        step = f"agent of machine {number}: starts fork server "
        eventually(step, lambda: log.exists() and step in log.read_text())  # noqa: B023
        (agent,) = [one for one in plugin_processes(surroundings) if "cluster_node" in command_line(one)]
        agent.kill()
    (suite.path / "both-are-lost").touch()
    result = session.finish()
    result.expect({"test_lost_twice": "ERROR", "test_next": "PASSED"})
    assert "is lost: " in result.failure("test_lost_twice")
    expect_free_nodes(surroundings)
    remove_folders_of_lost_nodes(surroundings)


@pytest.mark.long
def test_a_lost_node_or_head_fails_the_tests_that_need_it(suite: BackgroundSuite, surroundings: Surroundings) -> None:
    suite.write("test_it.py", ENDLESS)
    with cluster(surroundings) as made:
        masked = made.add(2, SIM_VISIBLE_DEVICES="1")
        short = run(suite, made, "test_it.py", "-k", "test_next")
        short.expect({"test_next": "ERROR"})
        said = "the cluster has reserved SIM_VISIBLE_DEVICES=0,1, but the test needs 2 sim devices"
        assert said in short.failure("test_next")
        masked.kill()
        node = made.add(2)
        session = start(suite, made, "test_it.py")
        suite.read("rank-1")
        made.add(2)
        node.kill()
        result = session.finish()
        outcomes = result.outcomes()
        # The test has an error if the node was lost before it had sent the driver the end of the setup.
        assert outcomes.pop("test_endless") in ("FAILED", "ERROR")
        assert outcomes == {"test_next": "PASSED"}, result.text
        assert "ranks 0-1 were lost with the machine" in result.failure("test_endless")
        expect_free_nodes(surroundings)
        remove_folders_of_lost_nodes(surroundings)

        suite.write(
            "test_it.py",
            f"{ENDLESS}\n\n    def test_unmarked():\n        import sys\n        assert 'ray' not in sys.modules\n",
        )
        (suite.path / "rank-1").unlink()
        session = start(suite, made)
        suite.read("rank-1")
        made.head.kill()
        result = session.finish()
        assert result.ret == 1
        assert result.outcomes()["test_unmarked"] == "PASSED"
        assert result.outcomes()["test_endless"] in ("FAILED", "ERROR")
        assert result.outcomes()["test_next"] in ("FAILED", "ERROR")
        expect_free_nodes(surroundings)


@pytest.mark.long
@pytest.mark.parametrize("version", ["1", "2"])
def test_an_autoscaler_adds_the_nodes_that_tests_wait_for(
    suite: BackgroundSuite, surroundings: Surroundings, version: str
) -> None:
    """The second test needs both nodes that the autoscaler may add, so an idle world must give up the first."""
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(2)
        def test_on_the_first(gather, accel):
            assert gather(accel.ids) == [("sim-0",), ("sim-1",)]


        @pytest.mark.distributed(4, nodes=2)
        def test_on_two(gather, node_rank):
            assert gather(node_rank) == [0, 0, 1, 1]
        """,
    )
    made = AutoscaledMachines({**surroundings.environment, "RAY_enable_autoscaler_v2": str(int(version == "2"))})
    try:
        made.wait_for_autoscaler()
        result = run(suite, made, "-n", "2")
    finally:
        made.close()
    result.expect({"test_on_the_first": "PASSED", "test_on_two": "PASSED"})
    assert "accel: sim, no devices; on 1 node of a Ray cluster, whose autoscaler may add some" in result.text
    expect_free_nodes(surroundings)


def test_an_invalid_cluster_address_is_a_usage_error(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write("test_it.py", TESTS)
    for value, text in (
        ("ray://a:10001", "the address of the cluster's head (ray:// is Ray's client server), got 'ray://a:10001'"),
        ("ray:127.0.0.1:1", "ERROR: --accel-cluster ray:127.0.0.1:1: no Ray cluster at 127.0.0.1:1: "),
    ):
        result = suite.run("-o", "accel=auto", "--accel-cluster", value)
        assert (result.ret, result.outcomes()) == (4, {})
        assert text in result.text
        assert "UsageError" not in result.text, "a traceback is shown"
