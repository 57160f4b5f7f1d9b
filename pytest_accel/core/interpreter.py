"""Python for processes that the plugin starts, and ports for the servers in them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

COVERAGE_SETTINGS = "COVERAGE_PROCESS_CONFIG"
"""Environment variable from which `coverage.process_startup` reads serialized settings."""
COVERAGE_SETTINGS_FILE = "COVERAGE_PROCESS_START"
"""Environment variable with the path of a settings file, set by a user."""
NO_CURRENT_FOLDER: tuple[str, ...] = ("-P",) if sys.version_info >= (3, 11) else ()
"""The flag with which ``python -c`` and ``python -m`` search no current folder for modules; Python 3.10 has none."""


def python_command(source: str, *arguments: str, path: Sequence[str] | None) -> list[str]:
    """Return the command that runs `source`, with the flags of this process and `path` as its ``sys.path``.

    With None, the process has the path that Python itself gives it. In both cases, no module is imported from the
    current folder unless `path` or PYTHONPATH names it: ``python -c`` alone would search it first, and a session that
    was started as ``pytest`` does not search it at all. So others who may write there cannot run code in the process.
    """
    # The private function passes on -W and similar flags. No function of `subprocess` does; multiprocessing uses this.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # It knows some of the options of -X.
    flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    # The statements below come too late in Python 3.13, which imports `linecache` before it runs `source`.
    flags += [flag for flag in NO_CURRENT_FOLDER if flag not in flags]
    if path is not None:
        source = f"import sys; sys.path[:] = {list(path)!r}\n{source}"
    elif not NO_CURRENT_FOLDER:
        source = f"import sys; del sys.path[0]\n{source}"
    return [sys.executable, *flags, "-c", source, *arguments]


def unmeasured(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that make coverage measure a new Python process from its start."""
    return {
        name: value for name, value in environment.items() if name not in (COVERAGE_SETTINGS, COVERAGE_SETTINGS_FILE)
    }


def hold_port() -> socket.socket:
    """Return a socket that holds its port until it is closed: the kernel assigns the port to no other socket.

    The socket does not listen, so a server can listen on the port if it sets SO_REUSEADDR or SO_REUSEPORT (socket(7)).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("", 0))
    return held
