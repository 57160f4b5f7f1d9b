"""Run-ahead: ranks that have all passed a test begin the next one without waiting for the driver.

The driver sends the next test ahead, so that the ranks do not wait for pytest's work in the driver between two tests.
A rank that has passed a test without leaks sends a checksum of its collectives to the other ranks, its peers. If all
checksums are equal, the ranks begin the next test; otherwise they wait for the driver. The driver receives the same
checksums with the results, and so knows what the ranks do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from select import POLLIN, poll
from socket import MSG_DONTWAIT, socket, socketpair
from struct import Struct
from zlib import crc32

from pytest_accel.core import fd_passing

_RECORD = Struct("<IQI")
"""A message between ranks: the sender, the number of the test, and the checksum."""
_send, _recv, _fileno = socket.send, socket.recv, socket.fileno  # A test may replace them.
_PEER_WAIT = 2
"""Milliseconds that a rank waits for the next checksum of a peer before it reports to the driver.

Ranks that pass at about the same time then send their messages together, and wake the driver once.
"""

Collectives = Mapping[str, tuple[tuple[int, ...], int]]
"""The ranks and the number of issued collectives of each process group, by its name (`group_state.collectives`)."""


def checksum(collectives: Collectives, groups: int) -> int:
    """Return the checksum of a rank that has passed a test.

    Ranks that have issued equally many `collectives` in the same groups, and created equally many `groups`, have the
    same checksum.
    """
    return crc32(repr((sorted(collectives.items()), groups)).encode())


def may_run_ahead(checksums: Collection[int | None], size: int) -> bool:
    """Return whether all `size` ranks begin the test that was sent ahead.

    A checksum is None if the rank did not pass the last test or left something behind.
    """
    return len(checksums) == size and len(set(checksums)) == 1 and None not in checksums


class PeerChannel:
    """The connection of one rank to all other ranks of its world."""

    def __init__(self, rank: int, sockets: Sequence[socket]) -> None:
        """`sockets` are those of `sockets_of`."""
        self._rank = rank
        self._inbox = sockets[0] if sockets else None
        """Receives from all other ranks; None if there are none."""
        self._outboxes = sockets[1:]
        """Sockets that send to the other ranks, one for each."""
        self._test = 0
        self._checksums: dict[int, dict[int, int]] = {}
        """Checksums by test and rank. A peer may be one test ahead: it needs only this rank's checksum to begin it."""

    def announce(self, test: int, checksum: int) -> None:
        """Send this rank's `checksum` of the world's test number `test`; wait for the others (see `_PEER_WAIT`)."""
        self._test = test
        self._checksums = {test: {**self._checksums.get(test, {}), self._rank: checksum}, test + 1: {}}
        for outbox in self._outboxes:
            with suppress(OSError):  # The peer has exited. The driver reports that.
                _send(outbox, _RECORD.pack(self._rank, test, checksum), MSG_DONTWAIT)
        self._read()
        self._wait(None, _PEER_WAIT)

    def wait_for_agreement(self, driver: Connection) -> bool:
        """Wait for the checksums of all ranks or a message of the driver; return whether all are known and equal."""
        self._wait(driver, None)
        return may_run_ahead(self._checksums[self._test].values(), self._size)

    @property
    def _size(self) -> int:
        return len(self._outboxes) + 1

    def _wait(self, driver: Connection | None, milliseconds: int | None) -> None:
        """Receive checksums until all ranks have sent theirs, `driver` sends a message, or nothing arrives for a time.

        `milliseconds` is that time; None: no limit.
        """
        polled = poll()
        if driver is not None:
            polled.register(driver.fileno(), POLLIN)
        if self._inbox is not None:
            polled.register(_fileno(self._inbox), POLLIN)
        while len(self._checksums[self._test]) < self._size:
            ready = {descriptor for descriptor, _ in polled.poll(milliseconds)}
            if not ready or (driver is not None and driver.fileno() in ready):
                return
            if not self._read():
                polled.unregister(ready.pop())

    def _read(self) -> bool:
        """Read the received checksums; return False if no more can arrive."""
        if self._inbox is None:
            return False
        try:
            data = _recv(self._inbox, 1 << 16, MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False  # The test has closed the socket.
        for rank, test, checksum in _RECORD.iter_unpack(data):
            if test in self._checksums:
                self._checksums[test][rank] = checksum
        return bool(data)


def connect(ranks: int) -> list[tuple[socket, socket]]:
    """Return a pair of sockets for each rank: it reads from the first, its peers write to the second.

    Return no pairs for a single rank.
    """
    return [socketpair() for _ in range(ranks)] if ranks > 1 else []


def receive(connection: Connection, ranks: int) -> list[tuple[socket, socket]]:
    """Receive the pairs that another process made with `connect`; raise EOFError if the `connection` is closed."""
    ends = [socket(fileno=descriptor) for descriptor in fd_passing.receive(connection, 2 * ranks)]
    return list(zip(ends[::2], ends[1::2], strict=True))


def sockets_of(rank: int, pairs: Sequence[tuple[socket, socket]]) -> list[socket]:
    """Return the sockets that `rank` uses: the one that it reads, then those to its peers; empty for a single rank."""
    return [pairs[rank][0], *(outbox for other, (_, outbox) in enumerate(pairs) if other != rank)] if pairs else []


def open_channel(rank: int, pairs: Sequence[tuple[socket, socket]]) -> PeerChannel:
    """Return the channel of `rank`; close the sockets that it does not use in this process."""
    for other, (inbox, outbox) in enumerate(pairs):
        (outbox if other == rank else inbox).close()
    return PeerChannel(rank, sockets_of(rank, pairs))
