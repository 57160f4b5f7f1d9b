"""The process from which spawned processes are forked, and what each of them does first and last.

The standard library's fork server (``multiprocessing.forkserver``) imports this module, which prepares the server, and
then forks. A spawned process has a new interpreter; so that its function sees no difference, a forked process first
gets the state of a new interpreter: the environment and output of the process that starts it, and random states of
its own. It unpickles and runs its function by the standard library's code.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import signal
import sys
import warnings
from multiprocessing import forkserver, reduction, util
from multiprocessing.process import BaseProcess
from typing import Any

from pytest_accel.core import processes
from pytest_accel.core.interpreter import unmeasured
from pytest_accel.core.processes import kill_descendants
from pytest_accel.core.signals import STACK_SIGNAL
from pytest_accel.forkserver.preload import blas_without_threads, import_named

SETTINGS = "PYTEST_ACCEL_SPAWN_SERVER"
"""Variable with JSON of a server's ``sys.path`` and modules: the standard library passes it only names of modules."""


def _prepare_server(path: list[str], modules: list[str]) -> None:
    """Import what the processes need, in the server; exit with an error if it must not be forked after that."""
    processes.become_subreaper()  # Otherwise processes whose parent has exited could not be found.
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # A process registers its handler when it has been forked.
    sys.path[:] = path
    gc.disable()  # Imports are faster without it, and processes would copy the pages that it walks through.
    with blas_without_threads():
        error = import_named(modules)
    sys.stdout.flush()
    if error is not None:
        sys.exit(f"accel: {error}")
    gc.freeze()
    atexit.register(_end_server, os.getpid())


def _end_server(server: int) -> None:
    """Kill all processes that still run, when the process that uses this server has exited or been killed."""
    if os.getpid() == server:
        kill_descendants()
        os._exit(0)


class Beginning:
    """The data with which a process prepares itself. A forked process that unpickles it is like a new interpreter."""

    def __init__(self, data: dict[str, Any], stacks: int) -> None:
        """`stacks` is the descriptor of the file to which the process writes its stacks on `STACK_SIGNAL`."""
        self._data, self._stacks = data, stacks

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, (self._data, dict(os.environ), *map(reduction.DupFd, (1, 2, self._stacks)))


def _begin(data: dict[str, Any], environment: dict[str, str], stdout: Any, stderr: Any, stacks: Any) -> dict[str, Any]:
    """Make this forked process like a new interpreter; return `data`."""
    for passed, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor := passed.detach(), standard)
        os.close(descriptor)
    faulthandler.register(STACK_SIGNAL, file=stacks.detach(), all_threads=True)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    gc.enable()
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # Python reseeds its own generators, and torch's have a constant seed.
    # Close the descriptor, since the server must see the end of the process that uses it. This process starts a server
    # of its own if needed: processes of the inherited server would have the wrong environment.
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = None
    if unmeasured(environment) != environment:
        import coverage

        coverage.process_startup()
    return data


class SpawnedProcess:
    """A process that exits as an interpreter does. The forked process unpickles it and calls `_bootstrap`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process: Any = process

    def _bootstrap(self, parent_sentinel: int) -> int:
        code: int = self._process._bootstrap(parent_sentinel)
        atexit._run_exitfuncs()
        util._flush_std_streams()  # type: ignore[attr-defined]
        return code


if SETTINGS in os.environ:
    _prepare_server(*json.loads(os.environ.pop(SETTINGS)))
