"""Checks whether ranks can be forked: a temporary process imports the fork server's modules and inspects itself."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pytest_accel.core.interpreter import python_command
from pytest_accel.features.doctor.facts import Forks

PLUGINS = "pytest's plugins"
_TIMEOUT = 120.0
"""Seconds for all imports. Torch alone may take 30 s from a network drive if it is not cached."""


def try_forks(modules: Sequence[str], timeout: float = _TIMEOUT) -> Forks:
    """Import `modules` after those of every fork server in a temporary process; return the result."""
    # This process owns the folder, because the other one may be killed before it could remove it.
    with tempfile.TemporaryDirectory(prefix="accel-doctor-") as folder:
        return _try_forks([folder, *modules], timeout)


def _try_forks(arguments: Sequence[str], timeout: float) -> Forks:
    # Use os._exit: threads that an import has started may keep the interpreter from exiting.
    source = f"import os, {__name__} as forks; forks.import_and_report(); os._exit(0)"
    with subprocess.Popen(
        python_command(source, *arguments, path=sys.path),
        env={**os.environ, "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
            hung = False
        except subprocess.TimeoutExpired as error:
            output, hung = error.output or b"", True
        finally:
            # Kill processes that an import has started: they hold the pipe open, and would leak.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return conclude(output.decode(errors="replace").splitlines(), process.returncode, timeout if hung else None)


def conclude(lines: Sequence[str], status: int, hung: float | None = None) -> Forks:
    """Return the result from the process's `lines` and exit status; `hung` is the timeout if it was killed.

    Messages are lines of JSON. Other lines are ignored: a `sitecustomize` module may print when the process starts.
    """
    name = "pytest_accel"
    for line in lines:
        message: Any = None
        with suppress(ValueError):
            message = json.loads(line)
        match message:
            case {"outcome": str()}:
                return Forks(**message)
            case {"importing": str(name)}:
                pass
    if hung is not None:
        return Forks("hung", name, f"{hung:g} seconds")
    return Forks("ended", name, f"signal {-status}" if status < 0 else f"exit status {status}")


def import_and_report() -> None:
    """Run in the temporary process: print a JSON line for each import and one for the outcome.

    Its arguments are a folder in which to load pytest's plugins, and the names of more modules.
    """
    folder, *modules = sys.argv[1:]
    # Imported modules may print: give them stderr as stdout.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(**message: str) -> None:
        print(json.dumps(message), file=output, flush=True)

    report(importing="pytest_accel.forkserver.preload")
    from pytest_accel.forkserver.preload import RANK_MODULES, TORCH_MODULES, load_plugins, unfit

    steps: list[tuple[str, Callable[[], object]]] = [
        (name, partial(importlib.import_module, name)) for name in (*RANK_MODULES, *TORCH_MODULES, *modules)
    ]
    steps.append((PLUGINS, partial(load_plugins, folder)))
    for name, step in steps:
        report(importing=name)
        try:
            step()
        except BaseException as error:
            report(outcome="failed", name=name, detail=f"{type(error).__name__}: {error}")
            return
        if (reason := unfit()) is not None:
            report(outcome="unfit", name=name, detail=reason)
            return
    report(outcome="fit")
