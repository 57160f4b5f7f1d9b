"""Slurm as Debian packages it, with network namespaces as nodes, so that its ports cannot be in use."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deadline import eventually

_SETTINGS = """
ClusterName=tests
SlurmctldHost={nodes[0].name}({nodes[0].address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
GresTypes=gpu
# Nodes may have fewer cores than they are said to have.
SlurmdParameters=config_overrides
{lines}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class SlurmNode(NamedTuple):
    """A node of Slurm."""

    name: str
    address: str
    enter: tuple[str, ...]
    """The prefix of a command that runs on the node."""


@dataclass(frozen=True)
class Slurm:
    """The running daemons of Slurm."""

    enter: tuple[str, ...]
    """The prefix of a command that can reach the daemons."""
    environment: dict[str, str]

    def put_on_path(self, folder: Path) -> None:
        """Write an ``srun`` to `folder` that reaches the daemons from every namespace."""
        program = folder / "srun"
        settings = " ".join(f"{name}={value}" for name, value in self.environment.items())
        program.write_text(f'#!/bin/sh\n{settings} exec {" ".join(self.enter)} {shutil.which("srun")} "$@"\n')
        program.chmod(0o755)


@contextlib.contextmanager
def single_node(folder: Path) -> Iterator[Slurm]:
    """Yield Slurm on one node in a network namespace; skip the test if Slurm or the namespace is not available."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root and util-linux")
    # Names are looked up only if there is an address besides the loopback's (getaddrinfo(3), AI_ADDRCONFIG).
    setup = ["sh", "-c", "ip link set lo up && ip addr add 192.0.2.1/32 dev lo && echo up && exec sleep infinity"]
    with _running(["unshare", "--net", *setup], subprocess.PIPE) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"up\n":
            pytest.skip("no network namespace can be made here")
        enter = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
        with cluster([SlurmNode(socket.gethostname(), "127.0.0.1", enter)], folder) as made:
            yield made


@contextlib.contextmanager
def cluster(nodes: Sequence[SlurmNode], folder: Path, *, cpus: int | None = None, gpus: int = 0) -> Iterator[Slurm]:
    """Yield Slurm on `nodes`, with its controller on the first; skip the test if Slurm is not installed.

    Slurm is configured with `cpus` cores (default: the available ones, two at least) and `gpus` GPUs for each node.
    """
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {' nor '.join(missing)} here")
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    resources = f"CPUs={cpus or max(2, len(os.sched_getaffinity(0)))}" + (f" Gres=gpu:{gpus}" if gpus else "")
    lines = "\n".join(f"NodeName={node.name} NodeAddr={node.address} {resources}" for node in nodes)
    # Slurm counts these files, but opens none of them.
    for number in range(gpus):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n" if gpus else "")
    for node in nodes:
        (folder / node.name).mkdir()
    (folder / "slurm.conf").write_text(_SETTINGS.format(nodes=nodes, lines=lines, folder=folder))
    slurm = Slurm(nodes[0].enter, {"SLURM_CONF": str(folder / "slurm.conf")})
    files = [f"--{name}={folder}/{file}" for name, file in _MUNGE.items()]
    daemons = [(nodes[0], ["munged", "--foreground", "--force", *files]), (nodes[0], ["slurmctld", "-D"])]
    daemons += [(node, ["slurmd", "-D", "-N", node.name]) for node in nodes]
    with contextlib.ExitStack() as stack:
        for node, command in daemons:
            log = stack.enter_context(open(folder / f"{command[0]}-{node.name}.log", "wb"))
            stack.enter_context(_running([*node.enter, *command], log, slurm.environment))
        query = [*slurm.enter, "sinfo", "--noheader", "--Node", "--format=%t"]
        eventually("the nodes of Slurm's", lambda: _output(query, slurm.environment).split() == ["idle"] * len(nodes))
        yield slurm


_MUNGE = {
    "key-file": "key",
    "socket": "munge.sock",
    "pid-file": "munged.pid",
    "log-file": "munge.log",
    "seed-file": "seed",
}


@contextlib.contextmanager
def _running(
    command: Sequence[str], output: object, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            # The signal is for the whole group, since unshare ignores it after a fork.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


def _output(command: Sequence[str], environment: dict[str, str]) -> str:
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return run.stdout.strip()
