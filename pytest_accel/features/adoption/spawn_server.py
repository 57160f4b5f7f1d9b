"""The process from which spawned processes are forked, and what each of them does first and last.

The standard library's fork server (``multiprocessing.forkserver``) imports this module, which makes the process fit for
that, and then forks. A spawned process has a new interpreter; so that its function sees no difference, a forked process
first gets what a new one would have: the environment and output of the process that starts it, and random states of
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
from multiprocessing import forkserver, reduction
from multiprocessing.process import BaseProcess
from typing import Any

from pytest_accel.core import prctl
from pytest_accel.core.interpreter import COVERAGE_SETTINGS, COVERAGE_SETTINGS_FILE
from pytest_accel.core.kill import kill_descendants
from pytest_accel.core.signals import STACK_SIGNAL
from pytest_accel.forkserver.preload import TORCH_MODULES, blas_without_threads, import_installed, import_named, unfit

SETTINGS = "PYTEST_ACCEL_SPAWN_SERVER"
"""Variable by which a server gets its settings: JSON of ``sys.path``, the modules to import, and whether torch is one.

The standard library passes only names of modules to its fork server.
"""


def _prepare_server(path: list[str], modules: list[str], *, torch: bool) -> None:
    """Import what the processes need, in the server; exit with an error if it must not be forked after that."""
    prctl.become_subreaper()  # Else no process could be found any more whose parent has exited.
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # A process registers its handler when it has been forked.
    sys.path[:] = path
    gc.disable()  # Imports are faster without it, and processes would copy the pages that it walks through.
    with blas_without_threads():
        import_installed(TORCH_MODULES if torch else ())
        error = import_named(modules)
    if error is None and (reason := unfit()) is not None:
        error = f"processes cannot be forked from one that has imported torch: the import {reason}"
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


class SpawnedProcess:
    """A `multiprocessing.Process` on its way to the process that runs it. Pickled in place of it."""

    def __init__(self, process: BaseProcess, stacks: int) -> None:
        """`stacks` is the descriptor of the file to which the process writes its stacks on `STACK_SIGNAL`."""
        self._process, self._stacks = process, stacks

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickled in this order: the function's module is imported with the environment and the output.
        return _Forked, (_Beginning(self._stacks), self._process)


class _Beginning:
    """Unpickling this makes a forked process equal to a new interpreter, as far as the code in it can see."""

    def __init__(self, stacks: int) -> None:
        self._descriptors = 1, 2, stacks

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, (dict(os.environ), *map(reduction.DupFd, self._descriptors))


def _begin(environment: dict[str, str], stdout: Any, stderr: Any, stacks: Any) -> None:
    for passed, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor := passed.detach(), standard)
        os.close(descriptor)
    faulthandler.register(STACK_SIGNAL, file=stacks.detach(), all_threads=True)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    gc.enable()
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed()  # Python reseeds its own generators, and torch's have a constant seed.
    # The server must see the end of the process that uses it, and this process starts a server of its own if it needs
    # one: its processes would have the wrong environment.
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = None
    if COVERAGE_SETTINGS in environment or COVERAGE_SETTINGS_FILE in environment:
        import coverage

        coverage.process_startup()


class _Forked:
    """The unpickled process, with the exit of an interpreter at its end."""

    def __init__(self, beginning: None, process: BaseProcess) -> None:
        self._process: Any = process

    def _bootstrap(self, parent_sentinel: int) -> int:
        code: int = self._process._bootstrap(parent_sentinel)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return code


if SETTINGS in os.environ:
    _prepare_server(**json.loads(os.environ.pop(SETTINGS)))
