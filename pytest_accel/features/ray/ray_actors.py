"""Code that runs in processes of Ray, on the nodes of a cluster: the actor of a node, and a task that names devices."""

from __future__ import annotations

import asyncio
import os
import tempfile

import psutil
import ray

from pytest_accel import __version__
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.truncation import read_end

_TAIL = 4_000
"""Maximum number of bytes of an agent's output that are shown."""
_OF_RAY = ("RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS")
"""Variables that Ray adds to the environment of a node."""


class NodeActor:
    """An actor that represents one node: it starts the node's agent, which ends with it."""

    async def run_agent(self, version: str, invitation: bytes) -> str:
        """Run the agent, and return how it ended, with the end of its output.

        `version` is the controller's version of pytest-accel.
        """
        if version != __version__:
            return f"was not started: pytest-accel {__version__} is installed there, and {version} in the session"
        source = f"from pytest_accel.features.ray.cluster_agent import run; run({os.getpid()}, {os.getppid()})"
        with tempfile.TemporaryFile() as output:
            # The thread of the actor's event loop starts the agent, and lives as long as the actor.
            process = await asyncio.create_subprocess_exec(
                *python_command(source, path=None),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=_node_environment(),
                start_new_session=True,
            )
            assert process.stdin is not None
            # The pipe stays open until the actor ends.
            process.stdin.write(invitation)
            status = await process.wait()
            text = read_end(output.fileno(), longest=_TAIL).strip()
        return f"exited with status {status}" + (f":\n{text}" if text else "")


# With Ray's default for `max_calls`, a process of Ray exits after a task that uses GPUs.
@ray.remote(num_cpus=0, max_calls=0, max_retries=0)  # type: ignore[untyped-decorator]
def device_ids(resource: str) -> list[str]:
    """Return the ids of this task's devices: values of the mask, as a process without a mask numbers them.

    Only a task in a bundle can ask Ray for them. The process that runs it is used again for later bundles.
    """
    ids: list[str] = ray.get_runtime_context().get_accelerator_ids()[resource]
    return sorted(ids, key=lambda one: (len(one), one))


def _node_environment() -> dict[str, str]:
    """Return the environment in which the node was started (``ray start``).

    The actor's own has additional variables, among them ``OMP_NUM_THREADS=1``, masks that hide devices, and
    ``PYTHONBREAKPOINT``. So this reads the environment of the parent process, which is Ray's own.
    """
    environment = psutil.Process(os.getppid()).environ()
    for name in _OF_RAY:
        environment.pop(name, None)
    # Ray's memory allocator is meant for the parent process only.
    if environment.get("LD_PRELOAD", "").startswith(os.path.dirname(ray.__file__)):
        del environment["LD_PRELOAD"]
    return environment
