"""A Slurm of one node, as Debian has it, in a network namespace of its own: its ports are nobody else's."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.worlds.conftest import eventually

_SETTINGS = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """Slurm's daemons, at work."""

    enter: tuple[str, ...]
    """What stands before a command that is to reach them."""
    environment: dict[str, str]

    def put_on_path(self, folder: Path) -> None:
        """An ``srun`` in `folder` that reaches them from anywhere."""
        program = folder / "srun"
        settings = " ".join(f"{name}={value}" for name, value in self.environment.items())
        program.write_text(f'#!/bin/sh\n{settings} exec {" ".join(self.enter)} {shutil.which("srun")} "$@"\n')
        program.chmod(0o755)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """Skips where it is not installed, or cannot have a namespace."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun", "unshare") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {' nor '.join(missing)} here")
    if os.getuid() != 0 or subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    with contextlib.ExitStack() as stack:
        # Names are not looked up where there is no address but the loopback's (getaddrinfo(3), AI_ADDRCONFIG).
        up = ["sh", "-c", "ip link set lo up && ip addr add 192.0.2.1/32 dev lo && echo up && exec sleep infinity"]
        holder = stack.enter_context(_running(["unshare", "--net", *up], subprocess.PIPE))
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        slurm = Slurm(("nsenter", f"--net=/proc/{holder.pid}/ns/net"), {"SLURM_CONF": str(folder / "slurm.conf")})
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        cpus = len(os.sched_getaffinity(0))
        settings = _SETTINGS.format(host=socket.gethostname(), folder=folder, cpus=cpus)
        (folder / "slurm.conf").write_text(settings)
        files = [f"--{name}={folder}/{file}" for name, file in _MUNGE.items()]
        for command in (["munged", "--foreground", "--force", *files], ["slurmctld", "-D"], ["slurmd", "-D"]):
            log = stack.enter_context(open(folder / f"{command[0]}.log", "wb"))
            stack.enter_context(_running([*slurm.enter, *command], log, slurm.environment))
        look = [*slurm.enter, "sinfo", "--noheader", "--format=%t"]
        eventually("a node of Slurm's", lambda: _said(look, slurm.environment) == "idle")
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
            process.terminate()


def _said(command: Sequence[str], environment: dict[str, str]) -> str:
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return run.stdout.strip()
