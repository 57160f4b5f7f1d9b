"""The driver's end of the link to one rank; `rank/link_to_driver.py` is the other end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from os import close, read
from socket import socket

from pytest_accel.core import processes
from pytest_accel.diagnostics.rank_state import RankState
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import call_rank
from pytest_accel.messages.rank_messages import RankMessage, RankMessages
from pytest_accel.messages.struct_messages import LENGTH, decode
from pytest_accel.messages.unix_sockets import is_readable
from pytest_accel.pool.pool_client import WorldGrant

_PIECE = 1 << 16
"""Maximum number of bytes that one read returns."""


class LinkToRank(RankState):
    """The state of one rank, and the driver's link to it. Owned by the world's `RankMonitor`."""

    def __init__(self, grant: WorldGrant, rank: int) -> None:
        """Connect to `rank` of the world of `grant`.

        Raise OSError if this process cannot open more files, or has changed its user since the ranks were started.
        """
        super().__init__(rank)
        self.pid = grant.pids[rank]
        self.is_remote = grant.spec.is_remote(rank)
        """True if the rank is on another machine."""
        self.call = partial(call_rank, grant.directory, grant.spec, rank, self.pid)
        """Opens another connection to the rank. Raises OSError if the rank is gone."""
        try:
            stream = self.call()
        except PermissionError:
            raise  # The rank is alive, and belongs to the user whom this process had when it was started.
        except OSError:
            # The rank is dead. Use a closed connection, so that the monitor notices the exit.
            stream, other = unix_sockets.pair()
            other.close()
        try:
            # For a rank on another machine, the agent of its machine closes the connection when the process has ended.
            self.pidfd = None if self.is_remote else processes.end_of(self.pid)
            """Readable when the process has ended (`processes.end_of`); None if there is no such descriptor."""
        except BaseException:
            stream.close()
            raise
        self.connection = stream
        self._unread = bytearray()
        """The first part of a message that has not arrived completely."""

    @property
    def sources(self) -> Iterator[socket | int]:
        """The file objects that become readable when the rank sends a message or ends."""
        yield self.connection
        if self.pidfd is not None:
            yield self.pidfd

    @property
    def has_exited(self) -> bool:
        """True if the process is known to have ended; messages of it may be unread."""
        return self.pidfd is not None and is_readable(self.pidfd)

    def receive(self) -> Iterator[RankMessage]:
        """Yield the messages that have arrived; raise EOFError or OSError if the rank has closed the connection.

        Raise ValueError for data that are no message. This does not wait for the rest of a message: the rank may hang.
        """
        piece = read(self.connection.fileno(), _PIECE)
        if not piece:
            raise EOFError
        self._unread += piece
        while len(self._unread) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                return
            messages: RankMessages = decode(bytes(self._unread[LENGTH.size : end]), RankMessages)
            del self._unread[:end]
            yield from messages

    def send(self, data: bytes) -> None:
        """Send a frame. The monitor notices the exit of a rank that is dead; a rank that does not read times out."""
        with suppress(OSError):
            unix_sockets.sendall(self.connection, data)

    def close(self) -> None:
        self.connection.close()
        if self.pidfd is not None:
            close(self.pidfd)
