"""How a process finds out that a launcher has started it, and how it meets the others of its kind."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pytest_accel.launch.outer import Outer, find, of_a_rank, without_local_rank
from pytest_accel.launch.outer_machines import Rendezvous, call, receive, rendezvous
from pytest_accel.launch.outer_meeting import MeetingError, gather, join, meeting_path
from pytest_accel.launch.outer_messages import Hello
from pytest_accel.launch.outer_session import differences

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
        pytest.param(TORCHRUN, Outer("torchrun", 1, 4, 1, 4, ("localhost", "44237", "c0188ff2", "0")), id="torchrun"),
        pytest.param(
            ACCELERATE, Outer("accelerate launch", 1, 4, 1, 4, ("localhost", "44237", "c0188ff2", "0")), id="accelerate"
        ),
        pytest.param(DEEPSPEED, Outer("deepspeed", 1, 2, 1, 2, ("127.0.0.1", "29500")), id="deepspeed"),
        pytest.param(OPEN_MPI, Outer("mpirun", 1, 2, 1, 2, ("1639055361", "1639055361")), id="open-mpi"),
        pytest.param(MPICH, Outer("mpirun", 1, 2, 1, 2, ("7-1.5",)), id="mpich"),
        pytest.param(SRUN, Outer("srun", 5, 6, 1, 2, ("71", "3")), id="srun"),
        pytest.param({**SRUN, **TORCHRUN}, Outer("torchrun", 1, 4, 1, 4, ("localhost", "44237", "c0188ff2", "0"))),
    ],
)
def test_each_launcher_is_known_by_its_own_variables(environ: dict[str, str], expected: Outer) -> None:
    assert find({**environ, "PATH": "/bin"}, "7-1.5") == expected


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}, id="exported by hand"),
        pytest.param({**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, id="alone"),
        pytest.param({**TORCHRUN, "TORCHELASTIC_RUN_ID": "accel-3"}, id="a rank of ours"),
        pytest.param({**TORCHRUN, "RANK": "one"}, id="no number"),
        pytest.param({"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, id="in sbatch, without srun"),
    ],
)
def test_what_is_no_launcher(environ: dict[str, str]) -> None:
    assert find(environ, "7-1.5") is None


def test_a_launcher_that_a_rank_of_ours_starts_is_one() -> None:
    assert find({**TORCHRUN, "TORCHELASTIC_RUN_ID": "accel-3", **OPEN_MPI}, "") == find(OPEN_MPI, "")


def key(environ: dict[str, str]) -> str:
    found = find(environ, "7-1.5")
    assert found is not None
    return found.key


def test_the_processes_of_a_job_have_a_key_and_those_of_another_one_another() -> None:
    restarted = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    keys = {key(environ) for environ in (TORCHRUN, restarted, DEEPSPEED, OPEN_MPI, MPICH, SRUN)}
    assert len(keys) == 6
    assert key({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}) == key(TORCHRUN)


def test_what_makes_a_process_a_rank() -> None:
    environ = {**TORCHRUN, **DEEPSPEED, **OPEN_MPI, **MPICH, **SRUN}
    kept = environ.keys() - set(of_a_rank({**environ, "OMPI_MCA_btl": "tcp", "OMP_NUM_THREADS": "1"}))
    assert kept == {"SLURM_JOB_ID"}


def test_deepspeeds_argument_for_old_scripts_is_no_argument_of_pytest() -> None:
    assert without_local_rank(["--local_rank=1", "-k", "local_rank", "--local-rank=0"]) == ["-k", "local_rank"]


def hello(rank: int, **other: object) -> Hello:
    values: dict[str, object] = {"args": ("-v",), "directory": "/here", "rootdir": "/here", "masks": {}, **other}
    return Hello(rank, os.getpid(), **values)  # type: ignore[arg-type]


def test_machines_may_number_their_devices_each_in_its_own_way() -> None:
    here, there = hello(0, masks={"A": "0,1"}), {"node": "there", "masks": {"A": "2,3"}}
    assert differences("torchrun", [here, hello(1, **there)]) is None
    told = differences("torchrun", [here, hello(1, **{**there, "masks": {"A": "2"}})])
    assert told is not None
    assert "visible devices: rank 0 has A=0,1, rank 1 has A=2" in told


def test_processes_that_agree() -> None:
    assert differences("torchrun", [hello(0), hello(1), hello(2)]) is None


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"args": ("-v", "-x")}, "arguments: rank 0 has -v, rank 2 has -v -x"),
        ({"args": ()}, "arguments: rank 0 has -v, rank 2 has none"),
        ({"directory": "/there"}, "working directory: rank 0 has /here, rank 2 has /there"),
        ({"rootdir": "/there"}, "root directory: rank 0 has /here, rank 2 has /there"),
        ({"masks": {"A": "1"}}, "visible devices: rank 0 has no mask, rank 2 has A=1"),
    ],
)
def test_processes_that_differ_are_named_with_both_values(other: dict[str, object], what: str) -> None:
    told = differences("torchrun", [hello(0), hello(1), hello(2, **other)])
    assert told is not None
    assert what in told


def world(rank: int) -> Outer:
    return Outer("torchrun", rank, 3, rank, 3, ("a", "b"))


@pytest.fixture(autouse=True)
def locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("l")
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", str(folder))
    return folder


def test_the_others_are_found_whoever_comes_first() -> None:
    # What a process that was killed has left.
    Path(meeting_path(world(0))).parent.mkdir(mode=0o700)
    Path(meeting_path(world(0))).touch()
    found: dict[str, Connection] = {}
    early = threading.Thread(target=lambda: found.update(early=join(world(2), hello(2), 30)))
    early.start()
    late = threading.Thread(target=lambda: found.update(late=join(world(1), hello(1), 30)))
    late.start()

    met = gather(world(0), 30)

    early.join()
    late.join()
    assert [one.rank for one, _ in met] == [1, 2]
    met[1][1].send("for rank 2")
    assert found["early"].recv() == "for rank 2"
    for connection in (*found.values(), *(connection for _, connection in met)):
        connection.close()
    assert not os.path.exists(meeting_path(world(0)))


def test_who_did_not_come_is_named() -> None:
    thread = threading.Thread(target=lambda: join(world(2), hello(2), 30).close())
    thread.start()

    with pytest.raises(MeetingError, match=r"torchrun has started 3 processes, and rank 1 did not come within 0.5 s"):
        gather(world(0), 0.5)

    thread.join()
    with pytest.raises(MeetingError, match=r"rank 0 did not come to rank 1 within 0 s"):
        join(world(1), hello(1), 0)


def test_a_folder_that_others_could_write_is_refused(locks: Path) -> None:
    folder = Path(meeting_path(world(0))).parent
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(MeetingError, match=r"cannot be used: .*not a folder of this user's alone"):
        gather(world(0), 0.1)


def test_a_long_path_is_not_too_long_for_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", "/" + "long/" * 30)
    assert len(meeting_path(world(0))) < 100


def test_where_processes_on_several_machines_meet() -> None:
    outer = Outer("mpirun", 0, 4, 0, 2, ("a",))
    exported = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29511"}
    found = rendezvous(exported, outer)
    assert (found.address, found.port, found.key) == ("node-0", 29511, None)
    assert found == rendezvous(exported, replace(outer, rank=3, local_rank=1))
    assert found.secret != rendezvous({**exported, "PYTEST_ACCEL_SECRET": "x"}, outer).secret
    agents = {**exported, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert rendezvous(agents, outer).key == "pytest-accel/2"
    for name in exported:
        with pytest.raises(MeetingError, match=rf"they do not know where to meet: .*{name}=''"):
            rendezvous({**exported, name: ""}, outer)


def test_processes_of_other_machines_are_told_from_those_of_this_one_and_from_strangers() -> None:
    outer = Outer("mpirun", 0, 3, 0, 2, ("a",))
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = Rendezvous("127.0.0.1", free.getsockname()[1], b"secret", None)
    found: dict[str, tuple[Connection, float] | None] = {}

    def come() -> None:
        with pytest.raises(MeetingError, match=r"rank 1 on there did not reach rank 0 at 127.0.0.1"):
            call(replace(outer, rank=1), replace(where, secret=b"guess"), there, 0.5)
        with socket.create_connection(("127.0.0.1", where.port)) as stranger:
            stranger.sendall(b"\0\0\0\x04ping")
            while stranger.recv(64):
                pass
        found["far"] = call(replace(outer, rank=1), where, there, 30)
        found["near"] = call(replace(outer, rank=2), where, hello(2, node="here"), 30)

    there = hello(1, node="there", host="there")
    thread = threading.Thread(target=come)
    thread.start()
    far, near = receive(outer, where, hello(0, node="here"), 30)
    thread.join()

    assert [one.hello for one in far] == [there]
    assert (near, found["near"]) == ([2], None)
    assert found["far"] is not None
    connection, clock = found["far"]
    assert abs(clock) < 1
    connection.send("from there")
    assert far[0].connection.recv() == "from there"
    for end in (connection, far[0].connection):
        end.close()
