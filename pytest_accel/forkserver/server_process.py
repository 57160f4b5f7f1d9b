"""The processes of fork servers, as the process that starts them sees them.

A fork server starts in two steps. In the first it imports torch and pytest's plugins. In the second it gets the
session's settings and serves. So the first server of a session can import at the same time as the session's conftests,
which often import torch, too (`features/early_start.py`): a session of one such test has its result seconds earlier.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import getpid
from socket import send_fds, socket
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Protocol

from pytest_accel.core.interpreter import python_command, unmeasured
from pytest_accel.core.launcher_env import for_own_ranks
from pytest_accel.core.processes import KILL_TIMEOUT, MARK, kill_tree, mark
from pytest_accel.core.session_folder import server_log_path
from pytest_accel.core.signals import without_sigpipe
from pytest_accel.forkserver.server_messages import Serve, file_with
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.session_spec import SessionSpec


class ServerProcess(Protocol):
    """The process of a fork server, which may be the child of another process."""

    @property
    def loss(self) -> str | None:
        """The name of its machine, and why this counts as lost; None if it does not."""

    def kill(self) -> None:
        """Kill the process and all its descendants; no-op if it has exited, or belongs to another user."""

    def wait(self, timeout: float) -> bool:
        """Return True once the process has exited, False after `timeout` seconds."""


Spawn = Callable[[SessionSpec], tuple[ServerProcess, socket]]
"""Function that starts a fork server for a session; it returns the process, and this end of the connection to it."""


class OwnServer:
    """A fork server that is a child of this process. It imports what ranks need, and waits for :func:`serve`."""

    loss = None

    def __init__(
        self, directory: str, server: int, plugin_options: tuple[str, ...] | None, path: Sequence[str]
    ) -> None:
        """Start the process with this environment, and with `path` as its ``sys.path``. Its output goes to its log.

        The other arguments are those of `forkserver.server.main`.
        """
        self.connection, theirs = unix_sockets.pair()
        """The connection to the process, which ends if this is closed."""
        with theirs, open(server_log_path(directory, server), "wb") as log:
            arguments = (theirs.fileno(), directory, server, plugin_options)
            source = f"from pytest_accel.forkserver.server import main; main(*{arguments!r})"
            self.process = Popen(
                python_command(source, path=path),
                pass_fds=[theirs.fileno()],
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(directory, server),
                start_new_session=True,  # Ctrl-C at the terminal must interrupt the driver only.
            )

    def kill(self) -> None:
        if self.process.poll() is None:
            kill_tree(self.process.pid)

    def end(self) -> None:
        """Kill the process, which serves no session yet, and wait for its exit."""
        self.kill()
        # A session that has given up root's rights cannot kill the process, which exits now.
        self.connection.close()
        self.wait(KILL_TIMEOUT)

    def wait(self, timeout: float | None) -> bool:
        with suppress(TimeoutExpired):
            self.process.wait(timeout)
            return True
        return False


def serve(connection: socket, spec: SessionSpec, *, anew: bool = False) -> None:
    """Have the fork server at the other end of `connection` serve `spec`, with this process's environment if `anew`.

    Raise OSError if that is impossible: the process has ended, or too many files are open.
    """
    environment = _environment(spec.directory, spec.server) if anew else None
    with file_with(Serve(spec, getpid(), environment), spec.directory) as given, without_sigpipe():
        send_fds(connection, [b"\0"], [given.fileno()])


def spawn_here(spec: SessionSpec) -> tuple[OwnServer, socket]:
    """Start a fork server as a child of this process, which serves `spec` (`Spawn`)."""
    server = OwnServer(spec.directory, spec.server, spec.plugin_options, spec.sys_path)
    with suppress(ConnectionError):  # It has ended, which the caller notices.
        serve(server.connection, spec)
    return server, server.connection


def _environment(directory: str, server: int) -> dict[str, str]:
    """Return the environment for a fork server, which is made from this process's."""
    return {**unmeasured(for_own_ranks(os.environ)), MARK: mark(directory, server)}
