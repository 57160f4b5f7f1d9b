"""Tests of pytest under launchers on two machines: network namespaces with different host names and mounts.

Tests that are not about a launcher start plain processes with the environment variables of srun(1).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests import slurm
from tests.background_suite import PYTEST, BackgroundSuite
from tests.core_verdicts import TESTS, VERDICTS
from tests.deadline import TIMEOUT, eventually, scaled
from tests.launcher_sessions import launched_process, start_endless
from tests.machines import ADDRESSES, NAMES, Machines, machines
from tests.run import CAUSES, Run
from tests.torch_release import RECORDS_COLLECTIVES

SECRET = "a secret that nobody guesses"
BATCH_FILES = Path(__file__).resolve().parents[3] / "examples" / "ci" / "slurm"


@pytest.fixture
def suite(suite: BackgroundSuite) -> BackgroundSuite:
    """Return a suite for ranks on the CPU, in which warnings are errors."""
    suite.write("pytest.ini", "[pytest]\naccel = none\naccel_launcher = on\nfilterwarnings = error\n")
    return suite


@pytest.fixture
def two_machines(suite: BackgroundSuite, tmp_path: Path) -> Iterator[Machines]:
    """Yield two machines. The test fails if a process is left on one of them."""
    with machines(tmp_path) as made:
        yield made
        eventually("all processes of both machines to end", lambda: not made.pids())


def run_both(far: str, near: str) -> tuple[str, ...]:
    """Return a program that runs the commands at the same time, and exits with the status of `near`."""
    script = f'{far} "$@" & {near} "$@"; code=$?; wait; exit $code'
    return ("/bin/sh", "-c", script, "both")


def torchrun(two_machines: Machines, per_node: int) -> tuple[str, ...]:
    """Return a program that starts pytest with torchrun, in `per_node` processes on each machine."""

    def agent(machine: int) -> str:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={per_node}"]
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400", "--rdzv-id=one"]
        words += [f"--local-addr={ADDRESSES[machine]}", "-m", "pytest"]
        return shlex.join([*two_machines.on(machine), *words])

    return run_both(agent(1), agent(0))


def srun(
    two_machines: Machines,
    *,
    private: Sequence[str] = (),
    far: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return a program that starts one process on each machine, as srun would, with the secret in the environment.

    The far machine does not share the folders `private`, and its process has the variables `far`.
    """

    def task(rank: int) -> str:
        variables = ["SLURM_JOB_ID=71", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_TASKS_PER_NODE=1,1"]
        variables += [f"SLURM_NODEID={rank}", f"SLURM_PROCID={rank}", "SLURM_LOCALID=0"]
        variables += [f"PYTEST_ACCEL_SECRET={SECRET}", f"MASTER_ADDR={ADDRESSES[0]}", "MASTER_PORT=29511"]
        # Without it torch warns, at any moment, that a name server is out of reach. With -s that is amid the results.
        variables += ["TORCH_CPP_LOG_LEVEL=ERROR"]
        variables += far if rank else ()
        return shlex.join([*two_machines.on(rank, private=private if rank else ()), "env", *variables, *PYTEST])

    return run_both(task(1), task(0))


TWO_MACHINE_TESTS = """
    import os
    import socket

    import pytest


    @pytest.mark.distributed(2, nodes=2)
    def test_both(rank, local_rank, node_rank, world_size, gather):
        import torch
        import torch.distributed as dist

        values = torch.full((2,), rank + 1.0)
        dist.all_reduce(values)
        assert values.tolist() == [3.0, 3.0]
        assert gather(socket.gethostname()) == ["near-node", "far-node"]
        assert (local_rank, node_rank, world_size) == (0, rank, 2)
        told = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")]
        assert told == ["0", "1", str(rank), "2"]
        assert os.environ["MASTER_ADDR"] == "10.77.0.1"


    @pytest.mark.distributed(1)
    def test_alone(node_rank, gather):
        assert (gather(socket.gethostname()), node_rank) == (["near-node"], 0)
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"


    @pytest.mark.distributed(3, nodes=3)
    def test_more_ranks():
        pass


    @pytest.mark.distributed(2, nodes=2)
    def test_a_folder(shared_tmp_path, tmp_path, rank, gather):
        import torch.distributed as dist

        if rank == 0:
            (shared_tmp_path / "weights").write_text("1 2 3")
        dist.barrier()
        assert (shared_tmp_path / "weights").read_text() == "1 2 3"
        assert len(set(gather(tmp_path))) == 2


    @pytest.mark.distributed(2, nodes=2)
    def test_a_port(free_port, rank, gather):
        server = socket.create_server(("", free_port)) if rank == 0 else None
        gather(None)
        with socket.create_connection((os.environ["MASTER_ADDR"], free_port)):
            gather(None)
        if server:
            server.close()


    def test_plain():
        assert "RANK" not in os.environ
"""
TWO_MACHINE_RESULTS = {
    "test_both": "PASSED",
    "test_alone": "PASSED",
    "test_more_ranks": "SKIPPED",
    "test_a_folder": "PASSED",
    "test_a_port": "PASSED",
    "test_plain": "PASSED",
}


@pytest.mark.long
def test_torchrun_starts_one_session_on_two_machines(suite: BackgroundSuite, two_machines: Machines) -> None:
    """Failures on the remote machine are reported like local ones."""
    suite.write("test_two_machines.py", TWO_MACHINE_TESTS)
    suite.write("pytest.ini", "[pytest]\naccel = sim:2\naccel_launcher = on\nfilterwarnings = error\n")
    suite.write("test_core.py", TESTS)
    suite.write(
        "test_it.py",
        """
        import os
        import signal
        import threading

        import pytest
        import torch.distributed as dist

        pytestmark = pytest.mark.distributed(2, nodes=2)


        def test_dies(rank, capfd):
            with capfd.disabled():
                os.write(2, b"a last word of rank %d\\n" % rank)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()


        def test_leaves_a_process(rank):
            if rank == 1 and not os.fork():
                threading.Event().wait()
        """,
    )

    run = suite.start(CAUSES, program=torchrun(two_machines, 1)).finish()

    own = {
        "test_dies": "FAILED died: SIGKILL; rank 1",
        "test_leaves_a_process": "PASSED ERROR leaked: process; rank 1",
    }
    run.expect({**VERDICTS, **own, **TWO_MACHINE_RESULTS})
    assert "accel: torchrun, 2 ranks on 2 machines: near-node (rank 0), far-node (rank 1)\n" in run.text
    assert run.text.count("test session starts") == 1
    assert "needs 3 ranks; torchrun has started 2" in run.text
    assert "a last word of rank 1" in run.failure("test_dies")
    hang = run.failure("test_hangs_on_one_rank")
    assert ("rank 1 has not reached barrier" in hang) is RECORDS_COLLECTIVES
    assert "time.sleep(1000)" in hang
    assert run.ret == 1


def mpirun(two_machines: Machines, folder: Path, flavour: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return a program that starts pytest with `variables` in four processes; skip the test without this MPI.

    `folder` is for the files of mpirun.
    """
    program = shutil.which(f"mpirun.{flavour}")
    if program is None:
        pytest.skip(f"there is no mpirun.{flavour} here")
    shell = str(two_machines.remote_shell(folder / "shell"))
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{name}{':2' if flavour == 'mpich' else ' slots=2'}\n" for name in NAMES))
    if flavour == "mpich":
        flags = ["-launcher", "ssh", "-launcher-exec", shell, "-f", str(hosts), "-ppn", "2"]
        flags += [word for name, value in variables.items() for word in ("-genv", name, value)]
    else:
        flags = ["--mca", "plm_rsh_agent", shell, "--hostfile", str(hosts), "-npernode", "2"]
        flags += [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    return (*two_machines.on(0), program, *flags, "-n", "4", *PYTEST)


OF_MPIRUN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PY_COLORS": "0"}
"""The environment of mpirun itself."""


def steps_of(log: Path, role: str) -> list[str]:
    """Return the steps of the processes with `role` that are in `log` so far, each after the name of its machine."""
    lines = log.read_text().splitlines() if log.exists() else []
    found = [re.fullmatch(rf"\S+ (\S+) \d+ {role}: (.*)", line) for line in lines]
    return [f"{match[1]} {match[2]}" for match in found if match is not None]


def wait_for_steps(log: Path, role: str, count: int) -> list[str]:
    """Wait until the process with `role` has written `count` steps, and return them."""
    eventually(f"{count} steps of {role}", lambda: len(steps_of(log, role)) >= count)
    return steps_of(log, role)[:count]


@pytest.mark.long(except_for="openmpi")
@pytest.mark.parametrize("flavour", ["mpich", "openmpi"])
def test_mpirun_starts_one_session_on_two_machines_and_the_log_shows_why_processes_do_not_join(
    suite: BackgroundSuite, two_machines: Machines, tmp_path: Path, flavour: str
) -> None:
    """MASTER_ADDR is the address of an interface that the far machine does not reach, until it gets a route."""
    log, address = suite.temporary / "steps.log", "10.78.0.1"
    variables = {"MASTER_ADDR": address, "MASTER_PORT": "29511", "PYTEST_ACCEL_SECRET": SECRET}
    command = mpirun(two_machines, tmp_path, flavour, {**variables, "PYTEST_ACCEL_LOG": str(log)})
    two_machines.add_unreachable_address(address)
    suite.write(
        "test_it.py",
        """
        import os
        import socket

        import pytest


        @pytest.mark.distributed(4)
        def test_all(rank, local_rank, node_rank, gather):
            import torch
            import torch.distributed as dist

            values = torch.ones(1)
            dist.all_reduce(values)
            assert values.item() == 4
            assert gather((socket.gethostname(), node_rank, local_rank)) == [
                ("near-node", 0, 0), ("near-node", 0, 1), ("far-node", 1, 0), ("far-node", 1, 1)
            ]
            assert os.environ["LOCAL_WORLD_SIZE"] == "2"


        @pytest.mark.distributed(2)
        def test_as_few_nodes_as_do(gather):
            assert gather(socket.gethostname()) == ["near-node", "near-node"]


        @pytest.mark.distributed(2, nodes=2)
        def test_one_on_each(gather):
            assert gather(socket.gethostname()) == ["near-node", "far-node"]
        """,
    )

    session = suite.start(program=command, environment=OF_MPIRUN)

    looks = [
        "far-node is one of 4 processes, 2 of them on this machine",
        f"far-node looks for rank 0 at {address}, port 29511",
        f"far-node cannot connect to rank 0 at {address}, port 29511: [Errno 101] Network is unreachable",
    ]
    for far in (2, 3):
        assert wait_for_steps(log, f"process {far} of mpirun", 3) == looks
    listens, waits, joined = wait_for_steps(log, "process 0 of mpirun", 4)[1:]
    assert listens.startswith("near-node listens on near-node at port 29511 of all interfaces: ")
    assert f"lo {address}" in listens
    assert f"{two_machines.links[0]} {ADDRESSES[0]}" in listens
    assert waits == f"near-node waits for ranks 1-3; MASTER_ADDR is {address}"
    assert joined == "near-node rank 1 on near-node has connected; still waits for ranks 2-3"

    two_machines.add_route(address)
    run = session.finish()
    run.expect(dict.fromkeys(("test_all", "test_as_few_nodes_as_do", "test_one_on_each"), "PASSED"))
    assert run.text.count("test session starts") == 1
    assert "accel: mpirun, 4 ranks on 2 machines: near-node (ranks 0-1), far-node (ranks 2-3)\n" in run.text
    assert run.ret == 0
    agent = steps_of(log, "process 2 of mpirun")
    assert agent[3:5] == [
        f"far-node is connected to rank 0 at {address}, port 29511",
        "far-node serves the driver",
    ]
    assert agent[-1] == "far-node ends"
    assert "far-node ends with status 0" in steps_of(log, "fork server 1")


@pytest.mark.long
def test_slurm_accepts_the_example_batch_files(suite: BackgroundSuite, two_machines: Machines, tmp_path: Path) -> None:
    """The file for two nodes is also run, with one simulated device and one rank on each node."""
    nodes = [slurm.SlurmNode(*fields) for fields in zip(NAMES, ADDRESSES, map(two_machines.on, range(2)), strict=True)]
    text = (BATCH_FILES / "two-nodes.sbatch").read_text(encoding="utf-8")
    changes = {"--ntasks-per-node=4": "--ntasks-per-node=1", "--gpus-per-node=4": "--gpus-per-node=1", "cuda:": "sim:"}
    for before, start_file in changes.items():
        assert text.count(before) == 1
        text = text.replace(before, start_file)
    suite.write("two-nodes.sbatch", text)
    suite.write("pytest.ini", "[pytest]\naccel = sim:1\nfilterwarnings = error\n")
    suite.write(
        "test_it.py",
        """
        import socket
        import pytest

        @pytest.mark.distributed(2, nodes=2)
        @pytest.mark.devices(1)
        def test_both(gather, accel, shared_tmp_path):
            assert sorted(gather(socket.gethostname())) == ["far-node", "near-node"]
            assert len(accel.devices) == 1
            assert len(set(gather(str(shared_tmp_path)))) == 1
        """,
    )
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTEST_ADDOPTS": "-v -p accel",
    }

    with slurm.cluster(nodes, tmp_path, cpus=64, gpus=4) as running:
        for path in sorted(BATCH_FILES.iterdir()):
            command = [*running.enter, "sbatch", "--test-only", str(path)]
            result = subprocess.run(
                command, env={**os.environ, **running.environment}, capture_output=True, text=True, check=False
            )
            assert result.returncode == 0, result.stderr
        command = [*running.enter, "sbatch", "--wait", "two-nodes.sbatch"]
        submitted = suite.start(program=command, environment={**environment, **running.environment}).finish()

    (output,) = suite.path.glob("two-node-tests-*.out")
    run = Run(submitted.ret, output.read_text(encoding="utf-8"))
    run.expect({"test_both": "PASSED"})
    assert "accel: srun, 2 ranks on 2 machines: " in run.text
    assert run.ret == 0


@pytest.mark.long
def test_a_disconnected_machine_is_named_and_ends_the_session(suite: BackgroundSuite, two_machines: Machines) -> None:
    session = start_endless(suite, 2, program=srun(two_machines))

    two_machines.cut()
    run = session.finish()

    # The result is ERROR if the driver did not learn in time that the far rank had passed the setup.
    assert run.outcomes() in ({"test_endless": "FAILED"}, {"test_endless": "ERROR"}), run.text
    assert "rank 1 was lost with the machine far-node (it did not answer for 10 s)" in run.failure("test_endless")
    assert "srun has lost the machine far-node with rank 1: it did not answer for 10 s" in run.text
    assert run.ret == 1


@pytest.mark.long
def test_nothing_is_left_on_the_remote_machine_if_the_process_of_rank_0_is_killed(
    suite: BackgroundSuite, two_machines: Machines
) -> None:
    log = suite.temporary / "steps.log"
    session = start_endless(suite, 2, program=srun(two_machines), environment={"PYTEST_ACCEL_LOG": str(log)})

    launched_process(suite, "SLURM_PROCID", "0").kill()

    assert session.finish().ret == 128 + signal.SIGKILL
    agent = steps_of(log, "process 1 of srun")
    assert "far-node the connection to the driver has ended" in agent
    assert agent[-1] == "far-node ends"
    assert steps_of(log, "fork server 1")[-2:] == [
        "far-node the driver has closed the connection",
        "far-node ends with status 0",
    ]


@pytest.mark.long
def test_each_machine_leases_its_own_devices_and_output_of_remote_ranks_is_shown(
    suite: BackgroundSuite, two_machines: Machines
) -> None:
    """The machines share only the suite's folder, so `shared_tmp_path` is an error. Remote breakpoints are skipped."""
    suite.write(
        "test_it.py",
        """
        import logging
        import os
        import socket
        from pathlib import Path

        import pytest

        LOCKS = Path(os.environ["PYTEST_ACCEL_LOCK_DIR"])


        @pytest.mark.distributed(2)
        def test_one_each(accel, devices, gather):
            assert (accel.ids, len(devices)) == (("sim-0",), 1)
            assert os.environ["SIM_VISIBLE_DEVICES"] == "sim-0"
            # Its machine's lock, which no other machine sees.
            held = (LOCKS / "pytest-accel-sim-0.lock").read_text()
            assert "test_one_each" in held
            assert len(set(gather(held))) == 2


        @pytest.mark.devices(4)
        @pytest.mark.distributed(2, nodes=2)
        def test_all_of_each(accel):
            # The world of the test before had one of them, and has been ended for its sake.
            assert accel.ids == ("sim-0", "sim-1", "sim-2", "sim-3")


        @pytest.mark.distributed(2, nodes=2, visible="rank")
        def test_own_only(accel, devices):
            assert (len(accel.ids), len(devices)) == (1, 1)


        @pytest.mark.devices(6)
        @pytest.mark.distributed(2, nodes=2)
        def test_too_many():
            pass


        @pytest.mark.devices(5)
        @pytest.mark.distributed(2, nodes=2)
        def test_too_many_for_the_far_machine():
            pass


        @pytest.mark.distributed(2, nodes=2)
        def test_a_folder(shared_tmp_path):
            pass


        @pytest.mark.distributed(2, nodes=2)
        def test_writes(rank):
            print(f"from rank {rank}")
            logging.getLogger().warning("logged")
            if rank == 1:
                breakpoint()


        @pytest.mark.devices(1)
        @pytest.mark.parametrize("number", range(2))
        def test_near(number):
            assert socket.gethostname() == "near-node"
        """,
    )

    program = srun(two_machines, private=[str(suite.temporary)], far=["SIM_VISIBLE_DEVICES=0,1,2,3"])
    options = ("-s", "--log-file=run.log", "--log-file-format=%(message)s", "--accel=sim:5,shared")
    run = suite.start(*options, f"--accel-wait={scaled(TIMEOUT):g}", program=program).finish()

    run.expect(
        {
            "test_one_each": "PASSED",
            "test_all_of_each": "PASSED",
            "test_own_only": "PASSED",
            "test_too_many": "SKIPPED",
            "test_too_many_for_the_far_machine": "ERROR",
            "test_a_folder": "ERROR",
            "test_near[0]": "PASSED",
            "test_near[1]": "PASSED",
        }
    )
    assert sorted((suite.path / "run.log").read_text().splitlines()) == ["[rank 0] logged", "[rank 1] logged"]
    assert "6 passed, 1 skipped, 2 errors" in run.text  # The output stands in the line of `test_writes`.
    assert "[rank 0] from rank 0\n" in run.text
    assert "[rank 1] from rank 1\n" in run.text
    assert "needs 6 sim devices; there are 5: 5 x sim (on near-node)" in run.text
    assert "needs 5 sim devices; there are 4" in run.failure("test_too_many_for_the_far_machine")
    assert "temporary folder is not there on far-node: give pytest a --basetemp" in run.failure("test_a_folder")
    assert run.ret == 1


@pytest.mark.long
def test_a_lost_lock_on_another_machine_ends_the_session_and_says_so(
    suite: BackgroundSuite, two_machines: Machines
) -> None:
    suite.write(
        "test_it.py",
        """
        import os
        import threading
        from pathlib import Path

        import pytest


        @pytest.mark.distributed(2, nodes=2, init=False)
        def test_it(rank):
            if rank == 1:
                Path(os.environ["PYTEST_ACCEL_LOCK_DIR"], "pytest-accel-sim-0.lock").unlink()
            threading.Event().wait()
        """,
    )
    program = srun(two_machines, private=[str(suite.temporary)])
    run = suite.start("--accel=sim:1,shared", program=program).finish()
    assert run.ret == 1
    # The test has an error if the agent has ended before it has sent the driver the end of the setup.
    assert re.search("1 (failed|error) in", run.text)
    assert "the lock of sim-0 was lost, since its lock file was deleted or moved" in run.text
    assert "an error at this end" not in run.text
    assert re.search(r"^!+ srun has lost rank 1 \(pid \d+ on far-node\) !+$", run.text, re.MULTILINE)
