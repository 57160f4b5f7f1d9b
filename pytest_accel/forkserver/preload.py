"""What the fork server imports ahead, and whether ranks may still be forked from it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Sequence

import psutil

from pytest_accel.settings.options import LAUNCHER, environment_variable

PLAIN_PRELOAD = ("torch", "torch.distributed", "pytest", "pytest_accel.rank.main")


def load_plugins(directory: str, named: Sequence[str] = ()) -> None:
    """Have pytest import its own, all installed and the `named` plugins, asserts rewritten as in any session.

    `directory` is where it runs.

    ``--version`` twice is the shortest run that loads them; conftests and ini files are the ranks' own business. Hooks
    of third-party plugins are not called: what they do to the process (pytest-django blocks databases) would stay.
    """
    import pytest

    from pytest_accel.core.plugin_roles import OptionsOnly

    before = os.getcwd()
    os.chdir(directory)
    changed = {
        # In a process of an MPI job: do not wait for the job's other processes.
        environment_variable(LAUNCHER): "none",
        # Its options may name files, which belong to the session; `named` has the plugins.
        "PYTEST_ADDOPTS": "",
    }
    given = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            names = [f"-p{name}" for name in named]
            pytest.main(
                ["--version", "--version", "--noconftest", "-c", os.devnull, "--rootdir", directory, *names],
                plugins=[OptionsOnly()],
            )
    finally:
        os.chdir(before)
        for name, value in given.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def let_loggers_propagate(package: str) -> None:
    """Have `package`'s records reach pytest's handlers through the root logger.

    pytest 9.2 attaches two handlers, three times a test, to each logger that does not propagate. torch has some forty,
    which is half the time of a small test; what is captured is the same.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == package and isinstance(logger, logging.Logger):
            logger.propagate = True


def unfit() -> str | None:
    """Why ranks must not be forked from this process, in words that follow "importing it"; None: they may be."""
    if psutil.Process().num_threads() > 1:
        return "starts threads"
    torch = sys.modules.get("torch")
    if torch is not None:
        names = ["cuda", "xpu", "hpu", "npu", "mlu", "musa"]
        # Naming it initialises nothing; it may be one that only its own package knows.
        if (current := getattr(getattr(torch, "accelerator", None), "current_accelerator", lambda: None)()) is not None:
            names.append(current.type)
        for name in names:
            runtime = getattr(torch, name, None)
            if runtime is not None and getattr(runtime, "is_initialized", lambda: False)():
                return f"initialises the {name} runtime"
    return None
