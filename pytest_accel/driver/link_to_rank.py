"""The driver's end of the link to one rank; `rank/link_to_driver.py` is the other end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from os import close

from pytest_accel.core import processes
from pytest_accel.diagnostics.rank_state import RankState
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import call_rank
from pytest_accel.messages.unix_sockets import Connection, is_readable
from pytest_accel.pool.pool_client import WorldGrant

STALL_TIMEOUT = 30
"""Seconds after which a rank that has sent part of a message counts as hung."""


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
            unix_sockets.limit_reads(stream, STALL_TIMEOUT)
            # For a rank on another machine, the agent of its machine closes the connection when the process has ended.
            self.pidfd = None if self.is_remote else processes.end_of(self.pid)
            """Readable when the process has ended (`processes.end_of`); None if there is no such descriptor."""
        except BaseException:
            stream.close()
            raise
        self.connection = Connection(stream.detach())

    @property
    def sources(self) -> Iterator[Connection | int]:
        """The file objects that become readable when the rank sends a message or ends."""
        yield self.connection
        if self.pidfd is not None:
            yield self.pidfd

    @property
    def has_exited(self) -> bool:
        """True if the process is known to have ended; messages of it may be unread."""
        return self.pidfd is not None and is_readable(self.pidfd)

    def send(self, data: bytes) -> bool:
        """Send an encoded message; return False if the rank lives and does not read it."""
        try:
            self.connection.send_bytes(data)
        except BlockingIOError:
            return False
        except OSError:
            pass  # The rank is dead, and the monitor notices the exit.
        return True

    def close(self) -> None:
        self.connection.close()
        if self.pidfd is not None:
            close(self.pidfd)
