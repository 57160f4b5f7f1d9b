"""Modules and plugins that the fork server imports before it forks, and the check that it may still be forked."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Collection, Iterator, Sequence

import psutil
import pytest

from pytest_accel.compat import torch_api
from pytest_accel.core.kinds import KINDS
from pytest_accel.settings.option_types import UNFORKABLE
from pytest_accel.settings.options import LAUNCHER, PRELOAD, environment_variable

TORCH_MODULES = ("torch", "torch.distributed")
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


@contextlib.contextmanager
def blas_without_threads() -> Iterator[None]:
    """Keep OpenBLAS from starting threads when it is loaded in the block; NumPy and SciPy have a copy each."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv(_BLAS_THREADS, os.environ.get(_BLAS_THREADS, "1"))
        yield


def import_installed(names: Sequence[str]) -> None:
    """Import the modules in `names` that are installed."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def import_named(names: Sequence[str]) -> str | None:
    """Import the modules that ``accel_preload`` names; return an error if ranks cannot be forked after that."""
    for name in names:
        known, threads = frozenset(sys.modules), thread_count()
        try:
            importlib.import_module(name)
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"
            return f"{PRELOAD}: {name} cannot be imported where ranks are forked: {what}; remove it from {PRELOAD}"
        reason = unfit(known, threads)
        if reason is not None:
            return (
                f"{PRELOAD}: ranks cannot be forked from a process that has imported {name}: the import {reason}; "
                f"remove it from {PRELOAD}, and each rank imports it itself"
            )
    return None


def load_plugins(directory: str, options: Sequence[str]) -> None:
    """Run pytest in `directory`, to import its own and all installed plugins with rewritten asserts.

    `options` may leave out plugins. The ranks read conftests and ini files themselves.
    """
    from pytest_accel.core.plugin_roles import OptionsOnly

    with pytest.MonkeyPatch.context() as changed, contextlib.redirect_stdout(io.StringIO()):
        changed.chdir(directory)
        # In a process of an MPI job, pytest-accel might otherwise wait for the job's other processes.
        changed.setenv(environment_variable(LAUNCHER), "off")
        # The options may name files, which only the session may open, and both may name modules of the suite.
        changed.setenv("PYTEST_ADDOPTS", "")
        changed.setenv("PYTEST_PLUGINS", "")
        # `--version` twice is the shortest run that loads plugins. With `OptionsOnly`, hooks of third-party plugins
        # are not called: their effects on the process would remain (pytest-django blocks databases).
        pytest.main(
            ["--version", "--version", "--noconftest", "-c", os.devnull, "--rootdir", directory, *options],
            plugins=[OptionsOnly()],
        )


def thread_count() -> int:
    """Return the number of threads of this process."""
    return psutil.Process().num_threads()


def unfit(known: Collection[str], threads: int) -> str | None:
    """Return why ranks must not be forked from this process, or None if they may be.

    The text continues a sentence that begins with "importing it". Modules in `known` and this number of `threads`
    existed before it.
    """
    if thread_count() > threads:
        return "starts threads"
    for name, reason in UNFORKABLE.items():
        if sys.modules.get(name) is not None and name not in known:
            return f"imports {name} ({reason})"
    return None if (runtime := used_runtime()) is None else f"initialises the {runtime} runtime"


def used_runtime() -> str | None:
    """Return torch's name of a device runtime that this process has initialised; None if there is none."""
    if (torch := sys.modules.get("torch")) is None:
        return None
    # torch's accelerator may be of a type that only another package knows.
    names = [kind.torch_type for kind in KINDS.values() if kind.hardware] + [torch_api.accelerator_type(torch)]
    for name in dict.fromkeys(filter(None, names)):
        if getattr(getattr(torch, name, None), "is_initialized", lambda: False)():
            return name
    return None
