"""The log of ``--accel-log FILE``: a line for each step of joining, starting, leasing, forking, running and ending.

All processes of a session append to the same file: the main process, xdist's workers, fork servers, ranks, and the
agents in other processes of a launcher and on the machines of a cluster. They find its path in the environment variable
`VARIABLE`, which a session with the option sets for its children. A line has the time, the machine, the process with
its role, and the step::

    14:03:22.118 gpu-1 4711 main process: WorldStarting: world=3, about='2 on cuda', ...
    14:03:22.131 gpu-1 4790 rank 1 of world 3: forked by process 4722

The pool reports what it does by events (`core/record_events.py`), and has no steps of its own. Without a file, a
step costs one function call.
"""

from __future__ import annotations

import logging
import os

import pytest

VARIABLE = "PYTEST_ACCEL_LOG"
"""Environment variable with the path of the file. Each machine has a file of its own, unless the folder is shared."""


# An instance that `logging` does not know: a suite that configures logging neither shows these lines nor disables them.
_logger = logging.Logger("pytest")


def start_session(config: pytest.Config, path: str | None) -> None:
    """Begin to write the steps of a pytest process, until it ends; `path` is the file of ``--accel-log``, if given.

    Raise ``pytest.UsageError`` if the file cannot be opened.

    No-op for a session in a process that writes its steps already, such as pytester's: its end must not close the file.
    """
    if is_on():
        return
    if wanted := path or os.environ.get(VARIABLE):
        # An absolute path: the processes of the session may have other working directories.
        file = os.path.realpath(config.invocation_params.dir / wanted)
        try:
            with open(file, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise pytest.UsageError(f"--accel-log {file}: cannot be opened: {error.strerror}") from None
        changed = pytest.MonkeyPatch()
        config.add_cleanup(changed.undo)
        changed.setenv(VARIABLE, file)
    start(os.environ.get("PYTEST_XDIST_WORKER", "main process"))
    config.add_cleanup(stop)
    step("pytest starts: %s", " ".join(map(str, config.invocation_params.args)))


def start(role: str) -> None:
    """Begin to write the steps of this process, whose role is `role`, to the file that the environment names, if any.

    In a process forked from a process with a log, only change the role. A test must not fail because its machine lacks
    the folder of the file: then this process and its children have no log.
    """
    _logger.name = role
    path = os.environ.get(VARIABLE)
    if path and not _logger.handlers:
        try:
            handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        except OSError:
            del os.environ[VARIABLE]
            return
        line = f"%(asctime)s.%(msecs)03d {os.uname().nodename} %(process)d %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
        _logger.addHandler(handler)


def is_on() -> bool:
    """Return whether this process writes its steps."""
    return bool(_logger.handlers)


def record(event: str, /, **fields: object) -> None:
    """Write an event of the session, such as a granted lease: a `Recorder` (`core/record_events.py`)."""
    step("%s: %s", event, ", ".join(f"{name}={value!r}" for name, value in fields.items()))


def stop() -> None:
    """Close the file."""
    while _logger.handlers:
        handler = _logger.handlers[0]
        _logger.removeHandler(handler)
        handler.close()


def step(text: str, *arguments: object) -> None:
    """Write the step ``text % arguments``, if there is a file."""
    if _logger.handlers:
        _logger.info(text, *arguments)
