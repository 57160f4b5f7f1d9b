"""The pool's client of a fork server, in the thread of the pool's event loop.

Nothing here blocks the loop, and no call raises because the server has ended or does not read: the server is killed
then, if it still runs, and its end is reported.
"""

from __future__ import annotations

from asyncio import open_connection, wait
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from socket import SHUT_WR, send_fds

from pytest_accel.compat import loop_tasks
from pytest_accel.core import session_folder
from pytest_accel.core.processes import KILL_TIMEOUT
from pytest_accel.core.signals import without_sigpipe
from pytest_accel.forkserver.server_messages import KillWorld, ServerReport, ServerRequest, StartWorld, file_with
from pytest_accel.forkserver.server_process import Spawn
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import encode, frame, read_message
from pytest_accel.messages.unix_sockets import MOST_AT_ONCE
from pytest_accel.messages.world_spec import WorldSpec

_STOP_TIMEOUT = 10.0
"""Seconds that a server has to exit after its connection has ended, before it is killed."""
_EXIT_POLL = 0.005
"""Seconds between two looks whether a server has exited, which takes it some milliseconds."""
_LAST_READ = 1.0
"""Seconds for the last messages of a server that has exited. A process may keep its end of the connection open."""


class ForkServerClient:
    """A running fork server, started by this object. All methods are called in the loop's thread."""

    def __init__(
        self,
        spec: SessionSpec,
        spawn: Spawn,
        report: Callable[[ServerReport], None],
        ended: Callable[[int, str | None], None],
    ) -> None:
        """Start the server with `spawn`. Raise OSError if that is impossible.

        ``report(message)`` is called with each message of the server, and ``ended(server, ServerProcess.loss)`` when
        its process has exited without :meth:`stop`, and its ranks with it: both in the loop's thread, and never from
        within a call of this object.
        """
        self._spec = spec
        self._report = report
        self._ended = ended
        self._used = self._is_stopping = False
        session_folder.ensure(spec.directory)
        self._process, self._socket = spawn(spec)
        self._socket.setblocking(False)
        self._reading = loop_tasks.start(self._read())

    def start(self, world: WorldSpec, descriptors: Sequence[int] | None, port: int | None = None) -> None:
        """Have the server start its ranks of `world`, which inherit the open files of `descriptors`.

        The caller may close its descriptors after this call. `port` is the port of the world's store, if another server
        has opened it. `descriptors` is None for a server on another machine, to which no open file can be passed. Raise
        OSError if too many are open.
        """
        self._used = True
        if descriptors is None:
            self._send(StartWorld(world, port))
            return
        with file_with(world, self._spec.directory) as file:
            self._send(StartWorld(None, port, 1 + len(descriptors)), [file.fileno(), *descriptors])

    def kill(self, world: int) -> None:
        """Have the server kill the ranks of `world`."""
        self._send(KillWorld(world))

    def kill_server(self) -> None:
        """Kill the server; its end is reported."""
        self._process.kill()

    async def stop(self) -> bool:
        """Stop the server, which kills all its descendants, and wait for its exit. No report follows.

        Return False if it did not exit in time and was killed, so that its descendants may live on.
        """
        if not self._used:
            self._process.kill()  # The server may still be importing; do not wait for that.
        self._is_stopping = True
        with suppress(OSError):  # The server may have ended.
            self._socket.shutdown(SHUT_WR)
        try:
            return await self._exit()
        finally:
            await wait([self._reading], timeout=_LAST_READ)
            self._reading.cancel()

    def _send(self, message: ServerRequest, descriptors: Sequence[int] = ()) -> None:
        """Send `message`, and `descriptors` after it."""
        try:
            with without_sigpipe():
                data = frame(encode(message))
                if self._socket.send(data) < len(data):
                    raise BlockingIOError  # All messages are small: if the socket is full, the server does not read.
                for first in range(0, len(descriptors), MOST_AT_ONCE):
                    send_fds(self._socket, [b"\0"], descriptors[first : first + MOST_AT_ONCE])
        except ConnectionError:
            pass  # The server has ended, which `_read` notices.
        except OSError:  # The server does not read, or has got only a part of the message.
            self._process.kill()

    async def _read(self) -> None:
        """Report the messages of the server until its connection ends, and then its end."""
        reader, writer = await open_connection(sock=self._socket)
        with closing(writer):
            while (message := await read_message(reader, ServerReport)) is not None:
                self._report(message)
        if not self._is_stopping:
            await self._exit()
        if not self._is_stopping:  # `stop` may have been called during the wait.
            self._ended(self._spec.server, self._process.loss)

    async def _exit(self) -> bool:
        """Wait for the exit of the server; kill it after `_STOP_TIMEOUT`, and return False then."""
        if await self._exits_within(_STOP_TIMEOUT):
            return True
        self._process.kill()
        await self._exits_within(KILL_TIMEOUT)
        return False

    async def _exits_within(self, seconds: float) -> bool:
        # Poll on all systems: the process may be the child of another process, and no descriptor reports its exit then.
        return await loop_tasks.becomes_true(lambda: self._process.wait(0.0), seconds, _EXIT_POLL)
