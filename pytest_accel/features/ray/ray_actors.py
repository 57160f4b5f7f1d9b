"""Code that runs in processes of Ray, on the nodes of a cluster: the actor of a node, and a task that names devices."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping

import psutil
import ray

from pytest_accel.core.interpreter import python_command
from pytest_accel.core.truncation import read_end
from pytest_accel.features.ray.cluster_node import additions, suite_code
from pytest_accel.features.ray.ray_messages import Invitation
from pytest_accel.messages.struct_messages import encode

_TAIL = 4_000
"""Maximum number of bytes of an agent's output that are shown."""
_OF_RAY = ("RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS")
"""Variables that Ray adds to the environment of a node."""


class NodeActor:
    """An actor that represents one node: it starts the node's agent, which ends with it."""

    def code(self, rootdir: str) -> dict[str, str]:
        """Return the code with which this node would run the tests below `rootdir`."""
        return suite_code(rootdir)

    def run_agent(self, invitation: Invitation, environ: Mapping[str, str]) -> str:
        """Run the agent, and return how it ended, with the end of its output.

        `environ` is the controller's environment.
        """
        environment = _node_environment()
        source = f"from pytest_accel.features.ray.cluster_node import run; run({os.getpid()})"
        with tempfile.TemporaryFile() as output:  # A pipe could stay open in processes that tests leave behind.
            done = subprocess.run(
                python_command(source, path=None),
                input=encode(invitation),
                stdout=output,
                stderr=output,
                env={**environment, **additions(environ, environment)},
                start_new_session=True,
                check=False,
            )
            text = read_end(output.fileno(), longest=_TAIL).strip()
        return f"exited with status {done.returncode}" + (f":\n{text}" if text else "")


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
