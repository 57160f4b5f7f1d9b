"""Whether ranks can be forked: a throw-away process imports what the fork server imports, and looks at itself."""

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

from pytest_accel.commands.doctor.facts import Forks

PLUGINS = "pytest's plugins"
_TIMEOUT = 120.0
"""Seconds; torch alone may take half a minute from a network drive that has not been read before."""


def try_forks(modules: Sequence[str], timeout: float = _TIMEOUT) -> Forks:
    """Import `modules` after what every fork server imports, in a process that then ends."""
    # Of this process, since the other one may not live to remove it.
    with tempfile.TemporaryDirectory(prefix="accel-doctor-") as folder:
        return _try_forks([folder, *modules], timeout)


def _try_forks(arguments: Sequence[str], timeout: float) -> Forks:
    with subprocess.Popen(
        # Threads that an import has started may keep an interpreter from its end for ever.
        [sys.executable, "-c", f"import os, {__name__} as forks; forks.import_and_tell(); os._exit(0)", *arguments],
        env={**os.environ, "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            # What an import has started holds the pipe open, and is not to stay.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if hung:
            output, _ = process.communicate()
    return conclude(output.decode(errors="replace").splitlines(), process.returncode, timeout if hung else None)


def conclude(lines: Sequence[str], status: int, hung: float | None = None) -> Forks:
    """From what the process told in `lines` and its exit status; `hung`: the seconds after which it was ended."""
    name = "pytest_accel"
    for line in lines:
        told = json.loads(line)
        if "outcome" in told:
            return Forks(**told)
        name = told["importing"]
    if hung is not None:
        return Forks("hung", name, f"{hung:g} seconds")
    return Forks("ended", name, f"signal {-status}" if status < 0 else f"exit status {status}")


def import_and_tell() -> None:
    """What the process does: a JSON line for each import, one for the outcome.

    Its arguments are a folder to load pytest's plugins in, and the names of more modules.
    """
    folder, *modules = sys.argv[1:]
    # What is imported may print.
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**facts: str) -> None:
        print(json.dumps(facts), file=told, flush=True)

    tell(importing="pytest_accel.forkserver.preload")
    from pytest_accel.forkserver.preload import PLAIN_PRELOAD, load_plugins, unfit

    steps: list[tuple[str, Callable[[], object]]] = [
        (name, partial(importlib.import_module, name)) for name in (*PLAIN_PRELOAD, *modules)
    ]
    steps.append((PLUGINS, partial(load_plugins, folder)))
    for name, step in steps:
        tell(importing=name)
        try:
            step()
        except BaseException as error:
            tell(outcome="failed", name=name, detail=f"{type(error).__name__}: {error}")
            return
        if (reason := unfit()) is not None:
            tell(outcome="unfit", name=name, detail=reason)
            return
    tell(outcome="fit")
