"""A process that has imported pytest, from which tests' sessions are forked.

A session needs 0.2 s of CPU to start an interpreter and to import pytest, which is one seventh of the time of most
tests. The server has imported none of pytest-accel's modules, so a session imports them as that of a user does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

_PRELOADED = ("pytest", "msgspec", "psutil", "pygments.lexers")
"""Modules that most sessions import. pytest rewrites its plugins as it imports them, so none is in this list."""
_READ_AT_START = re.compile(r"PYTHON|LD_|MALLOC_|LC_|LANG$|TZ$")
"""Variables that the loader, the C library and the interpreter read before a session could set them."""
WITHOUT_TORCH = str(Path(__file__).with_name("without_torch"))
"""Folder that hides torch from an interpreter in whose ``PYTHONPATH`` it is."""
_SIZE = 1 << 17
"""Bytes of a request, at most. Most of it is the environment."""


class ForkedSession:
    """A running session of a :class:`SessionServer`; its methods are those of :class:`subprocess.Popen`."""

    def __init__(self, results: socket.socket, command: Sequence[str]) -> None:
        """The server sends the process id and then the exit status on `results`, which this object owns."""
        self._results = results
        self._command = command
        self._pid = self._receive()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raise :class:`subprocess.TimeoutExpired` after `timeout` seconds."""
        if not select.select([self._results], [], [], timeout)[0]:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._command, timeout)
        with self._results:
            return self._receive()

    def kill(self) -> None:
        """Kill the session, which must not have been awaited."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _receive(self) -> int:
        content = self._results.recv(_SIZE)
        assert content, "the session server has ended"
        return int(content)


class SessionServer:
    """The client's end of a server process, which this object has started and ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start a server with the variables `environment`."""
        self._environment = environment
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Return whether a forked session with the variables `environment` does not differ from a new interpreter."""
        names = environment.keys() | self._environment.keys()
        return not any(
            _READ_AT_START.match(name) and environment.get(name) != self._environment.get(name) for name in names
        )

    def start(
        self,
        args: Sequence[str],
        folder: Path,
        path: Sequence[str],
        environment: Mapping[str, str],
        output: IO[str],
        errors: IO[str],
    ) -> ForkedSession:
        """Start ``python -m pytest`` with `args` in `folder`, with the variables `environment`.

        `path` has the entries of `PYTHONPATH` that the server does not have. The session writes to the files `output`
        and `errors`, and its standard input is empty.
        """
        request = {"args": args, "path": [str(folder), *path], "environment": dict(environment)}
        results, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            files = [output.fileno(), errors.fileno(), theirs.fileno()]
            socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        return ForkedSession(results, args)

    def close(self) -> None:
        """End the server. Its sessions have ended before."""
        self._connection.close()
        self._process.wait()


@contextlib.contextmanager
def _closing(descriptors: Sequence[int]) -> Iterator[None]:
    """Close `descriptors` after the ``with`` block."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _serve(connection: socket.socket) -> None:
    """Fork a session for each request. Return in the process of the session, once it is prepared."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The system reaps the processes that await the sessions.
    while True:
        content, descriptors, _, _ = socket.recv_fds(connection, _SIZE, 3)
        if not content:
            sys.exit()
        with _closing(descriptors):
            if os.fork():
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            output, errors, results = descriptors
            if pid := os.fork():
                with socket.socket(fileno=os.dup(results)) as sender:
                    sender.send(str(pid).encode())
                    _, status = os.waitpid(pid, 0)
                    sender.send(str(os.waitstatus_to_exitcode(status)).encode())
                os._exit(0)
            os.dup2(output, 1)
            os.dup2(errors, 2)
        _become(**json.loads(content))
        return


def _become(args: Sequence[str], path: Sequence[str], environment: Mapping[str, str]) -> None:
    """Give this process the folder, variables, arguments and module path of a new ``python -m pytest``.

    `path` has the folder and what follows it in front of the server's module path.
    """
    os.chdir(path[0])
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = path
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    sys.argv[:] = ["pytest", *args]


if __name__ == "__main__":
    del sys.path[0]  # The folder of this file.
    for module in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)
