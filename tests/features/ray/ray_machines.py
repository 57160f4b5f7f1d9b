"""A Ray cluster on this machine, whose nodes have different loopback addresses and declare their resources."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.background_suite import living_processes
from tests.deadline import eventually

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

_PROGRAM = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
"""The program ``ray`` of this interpreter. PATH may lack it."""
_STARTED = "Ray runtime started"


HEAD_HOST = "127.0.0.2"
"""The address of the head. The nodes have the next addresses. Ray replaces 127.0.0.1 by the address of an interface."""
_SIZE_OPTIONS = ("--object-store-memory=80000000", "--num-cpus=4")
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "30000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
"""The first setting keeps Ray from sending usage statistics, the second from starting a worker for each CPU in advance,
whenever a session connects; the sessions use none. With the others, the head and the nodes notice within seconds that
the other side is gone, whose port then refuses connections, and the autoscaler notices that a node is needed. A node
that is only slow stays."""


@dataclass(frozen=True)
class StartedNode:
    """A running ``ray start --block``. All processes of its node end with it."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self) -> None:
        """Wait until the node has joined the cluster."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return _STARTED in self.log.read_text()

        eventually(f"{_STARTED!r} in {self.log}", is_ready)

    def kill(self) -> None:
        """Kill all processes of the node, as a crash of its machine would."""
        root = psutil.Process(self.process.pid)
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # Some processes end with their parents.
                process.kill()
        self.process.wait()
        psutil.wait_procs(processes)


def start_node(
    folder: Path, host: str, number: int, environment: Mapping[str, str], options: Sequence[str], on: Sequence[str] = ()
) -> StartedNode:
    """Start a node with the address `host` and return it.

    `on` is the beginning of a command line that runs the rest of it on another machine.
    """
    log = folder / f"node-{number}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*on, *_PROGRAM, "start", "--block", f"--node-ip-address={host}", *_SIZE_OPTIONS, *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, **_SETTINGS},
            cwd=folder,
            start_new_session=True,
        )
    return StartedNode(process, log)


def address_of(folder: Path) -> str:
    """Return the address of the head of a cluster with the folder `folder`.

    Waits for it: `ray start` writes the file after it has said that the node runs.
    """
    file = folder / "ray" / "ray_current_cluster"
    return eventually(f"the address of the head in {file}", lambda: file.read_text() if file.exists() else "")


def join_options(folder: Path, gpus: int) -> tuple[str, ...]:
    """Return the options of a node with `gpus` GPUs that joins the cluster with the folder `folder`."""
    return f"--address={address_of(folder)}", "--include-log-monitor=false", f"--num-gpus={gpus}"


class RayMachines:
    """A cluster whose head declares no GPUs. All of its files are in `folder`, whose path must be short."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the head; `environment` is added to the environment of all processes of the cluster."""
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.environment = {
            **os.environ,
            **environment,
            "RAY_TMPDIR": str(self.folder),
        }
        self.environment.pop("RAY_ADDRESS", None)
        self._nodes: list[StartedNode] = []
        self._hosts = 1
        try:
            self.head = self._start(
                *("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={self.folder}/ray"),
                *self._head_options(),
            )
        except BaseException:
            self.close()
            raise

    def _head_options(self) -> tuple[str, ...]:
        """Return additional options of the head."""
        return ()

    @property
    def address(self) -> str:
        """The address of the head."""
        return address_of(self.folder)

    def add(self, gpus: int, **variables: str) -> StartedNode:
        """Start a node with `variables` in its environment, wait until it has joined, and return it.

        Nodes of one machine that start at the same time may choose the same names for their files.
        """
        return self._start(*join_options(self.folder, gpus), **variables)

    def _start(self, *options: str, **variables: str) -> StartedNode:
        self._hosts += 1
        host = f"127.0.0.{self._hosts}"
        node = start_node(self.folder, host, self._hosts, {**self.environment, **variables}, options)
        self._nodes.append(node)
        node.wait_ready()
        return node

    def close(self) -> None:
        for node in reversed(self._nodes):
            if node.process.poll() is None:
                node.kill()
        # Processes of a node that has ended by itself may still write there.
        eventually("all processes of the cluster to end", lambda: not living_processes("RAY_TMPDIR", str(self.folder)))
        shutil.rmtree(self.folder)
