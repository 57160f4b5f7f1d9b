"""Tests of the detection of launchers, and of the rendezvous of launched processes."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from pytest_accel.core.interpreter import hold_port
from pytest_accel.core.launcher_env import LauncherEnv, find, find_here, of_a_rank, without_local_rank
from pytest_accel.core.stash_keys import is_xdist_worker
from pytest_accel.features.launchers import machine_link, rendezvous
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.launched_session import find_difference
from pytest_accel.features.launchers.rendezvous import (
    Address,
    RendezvousError,
    find_address,
    gather,
    gather_machines,
    rendezvous_path,
)
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.world_spec import worker_environment
from tests.deadline import eventually
from tests.peers import read_all

PARENT = str(os.getppid())
SECRET = "nobody can guess this one"

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "44237",
    "TORCHELASTIC_RUN_ID": "c0188ff2",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
ACCELERATE = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}
DEEPSPEED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1639055361",
    "OMPI_MCA_ess_base_jobid": "1639055361",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(
            TORCHRUN, LauncherEnv("torchrun", 1, 4, 1, 4, ("localhost", "44237", "c0188ff2", "0")), id="torchrun"
        ),
        pytest.param(
            ACCELERATE,
            LauncherEnv("accelerate launch", 1, 4, 1, 4, ("localhost", "44237", "c0188ff2", "0")),
            id="accelerate",
        ),
        pytest.param(DEEPSPEED, LauncherEnv("deepspeed", 1, 2, 1, 2, ("127.0.0.1", "29500")), id="deepspeed"),
        pytest.param(OPEN_MPI, LauncherEnv("mpirun", 1, 2, 1, 2, ("1639055361", "1639055361")), id="open-mpi"),
        pytest.param(MPICH, LauncherEnv("mpirun", 1, 2, 1, 2, (), PARENT), id="mpich"),
        pytest.param(SRUN, LauncherEnv("srun", 5, 6, 1, 2, ("71", "3")), id="srun"),
        pytest.param(
            {**SRUN, **TORCHRUN}, LauncherEnv("torchrun", 1, 4, 1, 4, ("localhost", "44237", "c0188ff2", "0"))
        ),
    ],
)
def test_each_launcher_is_recognized_by_its_variables(environ: dict[str, str], expected: LauncherEnv) -> None:
    assert find({**environ, "PATH": "/bin"}) == expected


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="empty"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}, id="exported by hand"),
        pytest.param({**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, id="one process"),
        pytest.param({**TORCHRUN, "TORCHELASTIC_RUN_ID": "accel-3"}, id="a rank of this plugin"),
        pytest.param({**TORCHRUN, "RANK": "one"}, id="invalid number"),
        pytest.param({"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, id="in sbatch, without srun"),
    ],
)
def test_no_launcher_is_recognized_in_other_environments(environ: dict[str, str]) -> None:
    assert find(environ) is None


@pytest.mark.parametrize(("environ", "parent"), [(TORCHRUN, ""), (MPICH, "0")], ids=["torchrun", "mpich"])
def test_a_launcher_outside_of_the_container_is_recognized(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], parent: str
) -> None:
    for name in of_a_rank(os.environ):
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(os, "getppid", lambda: 0)
    found = find_here()
    assert found is not None
    assert found.parent == parent


def test_a_launcher_started_in_a_rank_is_recognized() -> None:
    assert find({**TORCHRUN, "TORCHELASTIC_RUN_ID": "accel-3", **OPEN_MPI}) == find(OPEN_MPI)


def key(environ: dict[str, str]) -> str:
    """Return the key of the job in whose environment a launcher is found."""
    found = find(environ)
    assert found is not None
    return found.key


def test_all_processes_of_a_job_have_one_key_and_jobs_have_different_keys() -> None:
    restarted = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    keys = {key(environ) for environ in (TORCHRUN, restarted, DEEPSPEED, OPEN_MPI, MPICH, SRUN)}
    assert len(keys) == 6
    assert key({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}) == key(TORCHRUN)


def test_variables_that_make_a_process_a_rank_are_removed() -> None:
    environ = {**TORCHRUN, **DEEPSPEED, **OPEN_MPI, **MPICH, **SRUN}
    kept = environ.keys() - set(of_a_rank({**environ, "OMPI_MCA_btl": "tcp", "OMP_NUM_THREADS": "1"}))
    assert kept == {"SLURM_JOB_ID"}


def test_the_argument_local_rank_of_deepspeed_is_not_given_to_pytest() -> None:
    assert without_local_rank(["--local_rank=1", "-k", "local_rank", "--local-rank=0"]) == ["-k", "local_rank"]


def hello(rank: int, **other: object) -> Hello:
    """Return the message of `rank`, with the fields `other` changed."""
    values: dict[str, object] = {"facts": {"arguments": "-v", "visible devices": "A=0"}, **other}
    return Hello(rank, os.getpid(), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({}, None),
        ({"arguments": "-v -x"}, "arguments: rank 0 has -v, rank 2 has -v -x"),
        ({"visible devices": "no mask"}, "visible devices: rank 0 has A=0, rank 2 has no mask"),
    ],
)
def test_a_difference_between_processes_names_both_values(other: dict[str, str], what: str | None) -> None:
    last = hello(2, facts={**hello(0).facts, **other})
    difference = find_difference("torchrun", [hello(0), hello(1), last])
    assert difference is None if what is None else what in str(difference)


def test_machines_may_have_different_devices_but_not_different_numbers_of_processes() -> None:
    there = hello(1, facts={**hello(0).facts, "visible devices": "A=1"}, machine="there")
    assert find_difference("srun", [hello(0), there]) is None
    text = "srun has started different numbers of processes on the machines (2, 1): start as many on each"
    assert find_difference("srun", [hello(0), hello(2), there]) == text


def world(rank: int) -> LauncherEnv:
    """Return the environment of `rank` in a job of three processes."""
    return LauncherEnv("torchrun", rank, 3, rank, 3, ("a", "b"))


@pytest.fixture(autouse=True)
def surroundings_of_a_rendezvous(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the lock folder, from which the path of the rendezvous is made."""
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", str(tmp_path_factory.mktemp("l")))


def join_as(found: dict[int, object], own: Hello, where: Address | None = None) -> threading.Thread:
    """Join as a rank, in a new thread that stores the connection or the error in `found`; return the thread."""

    def run() -> None:
        try:
            process = world(own.rank)
            found[own.rank] = (
                rendezvous.join(process, own, 30)
                if where is None
                else rendezvous.join_machines(process, own, where, 30)
            )
        except RendezvousError as error:
            found[own.rank] = str(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_missing_processes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over once rank 2 has connected."""
    Path(rendezvous_path(world(0))).touch()  # A killed process may have left its socket behind.
    original, met = rendezvous.accept, list[object]()

    def accept(*call: Any) -> Any:
        met.append(original(*call))
        return met[-1]

    monkeypatch.setattr(rendezvous, "accept", accept)
    monkeypatch.setattr(rendezvous, "monotonic", lambda: 30.0 if any(met) else 0.0)
    thread = join_as({}, hello(2))

    text = "torchrun has started 3 processes, and rank 1 did not connect within 30 s"
    with pytest.raises(RendezvousError, match=text):
        gather(world(0), 30)

    thread.join()
    with pytest.raises(RendezvousError, match=r"rank 1 on  did not reach rank 0 at .*, within 0 s: .*No such file"):
        rendezvous.join(world(1), hello(1), 0)


def test_a_second_session_of_a_job_is_refused_and_a_silent_process_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_GREETING_TIMEOUT", 1)
    path = rendezvous_path(world(0))
    with unix_sockets.listen(path, 2) as listener, unix_sockets.connect(path):
        assert rendezvous.accept(listener, 30) is None
        with pytest.raises(RendezvousError, match=r"another session under torchrun .* is starting"):
            gather(world(0), 0)


def test_the_rendezvous_of_several_machines_is_read_from_the_environment() -> None:
    """Beside the store of torchrun's agents, no secret is needed; if there is one, both ends must have it."""
    process = LauncherEnv("mpirun", 0, 4, 0, 2, ("a",))
    exported = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29511", "PYTEST_ACCEL_SECRET": SECRET}

    def find(process: LauncherEnv = process, **changes: str) -> Address:
        found = find_address({**exported, **changes}, process)
        assert found is not None
        return found

    found = find()
    assert (found.host, found.port) == ("node-0", 29511)
    assert found == find(process._replace(rank=3, local_rank=1))
    others = find(PYTEST_ACCEL_SECRET=f"{SECRET}!"), find(MASTER_ADDR="node-1"), find(process._replace(job=("b",)))
    assert len({one.key for one in (found, *others)}) == 4
    beside = find(TORCHELASTIC_USE_AGENT_STORE="True")
    unsaid = find(TORCHELASTIC_USE_AGENT_STORE="True", PYTEST_ACCEL_SECRET="")
    assert beside.port == unsaid.port != found.port
    assert beside.key != unsaid.key
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(RendezvousError, match=rf"needs an address to meet at .*{name}=''"):
            find_address({**exported, name: ""}, process)


@pytest.mark.parametrize("secret", ["", "guess me\n"])
def test_a_process_without_a_usable_secret_ends_at_once(secret: str) -> None:
    text = r"rank 3 on .* needs a secret of at least 16 characters.*export PYTEST_ACCEL_SECRET with the same value"
    exported = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29511", "PYTEST_ACCEL_SECRET": secret}
    process = LauncherEnv("srun", 3, 4, 1, 2, ("a",))
    with pytest.raises(RendezvousError, match=text) as raised:
        find_address(exported, process)
    # The command in the message makes a secret.
    (command,) = re.findall(r"export (PYTEST_ACCEL_SECRET=\$\(.*?\)\)'\))", str(raised.value))
    made = subprocess.run(f"{command}; printf %s $PYTEST_ACCEL_SECRET", shell=True, check=True, capture_output=True)
    assert find_address({**exported, "PYTEST_ACCEL_SECRET": made.stdout.decode()}, process) is not None


@pytest.fixture
def address() -> Iterator[Address]:
    """Provide a port of this machine, which no other process gets meanwhile."""
    with hold_port() as held:
        yield Address("127.0.0.1", held.getsockname()[1], b"a key that no other process has.")


def test_processes_of_other_machines_are_accepted_and_strangers_are_rejected(address: Address) -> None:
    """Strangers send nothing, a part of a greeting, or another protocol."""
    found: dict[int, object] = {}
    there = hello(1, host="there", facts={"arguments": "-k \udcff"})
    near = hello(2, host="here")
    with contextlib.ExitStack() as strangers:
        threads: list[threading.Thread] = []

        def join_after_strangers() -> None:
            for number in range(200):
                stranger = strangers.enter_context(connect_to(address))
                with contextlib.suppress(OSError):
                    stranger.sendall((b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48))[: number % 70])
            for said in (b"", b"GET / HTTP/1.1\r\n" * 9):
                other = strangers.enter_context(connect_to(address))
                other.sendall(said)
                # The connection is closed. The greeting of zmq says nothing about the job.
                assert len(read_all(other)) <= len(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE") + 48
            threads.extend([join_as(found, there, address), join_as(found, near, address)])

        joining = threading.Thread(target=join_after_strangers)
        joining.start()
        met, link = gather_machines(world(0), address, 60)
        joining.join()
        for thread in threads:
            thread.join()

    at = {"address": "127.0.0.1", "driver_address": "127.0.0.1"}
    assert [greeting for _, greeting in met.values()] == [structs.replace(one, **at) for one in (there, near)]
    link.close()
    for agent in found.values():
        assert isinstance(agent, machine_link.AgentLink)
        agent.close()


def connect_to(where: Address) -> socket.socket:
    """Wait until a process listens at `where`, and return a connection to it."""

    def look() -> socket.socket | None:
        with contextlib.suppress(OSError):
            return socket.create_connection((where.host, where.port), 30)
        return None

    made = eventually("somebody to listen", look)
    assert made is not None
    return made


def test_a_process_with_another_secret_ends(address: Address) -> None:
    joined: list[object] = []
    other = replace(address, key=b"another key than that of rank 0.")
    text = r"has another secret \(PYTEST_ACCEL_SECRET\) than rank 1 on remote-node, or belongs to another job"
    link = machine_link.DriverLink(address.key, address.port, lambda *call: joined.append(call))
    with contextlib.closing(link), pytest.raises(RendezvousError, match=text):
        rendezvous.join_machines(world(1), hello(1, host="remote-node"), other, 0)
    assert joined == []
    with pytest.raises(RendezvousError, match="ranks 1-2 did not connect within 0 s"):
        gather_machines(world(0), address, 0)


def test_several_machines_need_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "find_spec", lambda name: None)
    exported = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29511", "PYTEST_ACCEL_SECRET": SECRET}
    said = r"on several machines, and rank 3 .* needs pyzmq.* pip install 'pytest-accel\[cluster\]'"
    with pytest.raises(RendezvousError, match=said):
        find_address(exported, LauncherEnv("srun", 3, 4, 1, 2, ("a",)))


def test_a_process_that_a_test_starts_in_a_rank_is_no_xdist_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"workerid": "gw3", "workercount": 4, "testrunuid": "outer"}
    for name, value in worker_environment(given).items():
        monkeypatch.setenv(name, str(value))
    assert not is_xdist_worker()
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "inner")  # A worker of a session inside the rank.
    assert is_xdist_worker()
