"""A Ray cluster on this machine: nodes with loopback addresses of their own and declared resources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.conftest import eventually

_PROGRAM = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
"""The program ``ray`` of this interpreter, which need not be in PATH."""
_STARTED = "Ray runtime started"


@dataclass
class Started:
    """A running ``ray start --block``, with which all processes of its node end."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return _STARTED in self.log.read_text()

        eventually(f"node of {self.log}", is_ready)

    def end(self) -> None:
        """End the node as a crash of its machine would."""
        group = [self.process_of_node(), *self.process_of_node().children(recursive=True)]
        for process in group:
            process.kill()
        psutil.wait_procs(group)
        self.process.wait()

    def process_of_node(self) -> psutil.Process:
        return psutil.Process(self.process.pid)


class RayMachines:
    """A cluster, whose head declares no GPUs. Nothing is written outside `folder`, whose path must be short."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.folder)}
        self.environment.pop("RAY_ADDRESS", None)
        self._nodes: list[Started] = []
        self._hosts = 1
        self.head = self._start("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={self.folder}/ray")
        self.head.wait_ready()

    @property
    def address(self) -> str:
        return (self.folder / "ray" / "ray_current_cluster").read_text()

    def add(self, *options: str) -> Started:
        """Start a node; do not wait."""
        return self._start(f"--address={self.address}", "--include-log-monitor=false", *options)

    def _start(self, *options: str) -> Started:
        self._hosts += 1
        log = self.folder / f"node-{self._hosts}.log"
        host = f"127.0.0.{self._hosts}"  # Ray replaces 127.0.0.1 by the address of an interface.
        with log.open("wb") as output:
            command = [*_PROGRAM, "start", "--block", f"--node-ip-address={host}", "--object-store-memory=80000000"]
            process = subprocess.Popen(
                [*command, "--num-cpus=4", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )
        self._nodes.append(Started(process, log))
        return self._nodes[-1]

    def close(self) -> None:
        for node in reversed(self._nodes):
            if node.process.poll() is None:
                node.end()
        shutil.rmtree(self.folder)
