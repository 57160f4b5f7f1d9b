"""Ranks that have all passed a test go on to the next one by themselves.

The driver has told them of it ahead. What pytest does in the driver between two tests then takes no time of theirs.
Each rank gives its word to the others when it has passed a test and left nothing behind; where one does not, or the
words differ, nobody goes on before the driver says so. The driver has the same words, and knows what the ranks do.
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
_send, _recv, _fileno = socket.send, socket.recv, socket.fileno
_MOMENT = 2
"""Milliseconds in which ranks that pass together have done so. Their messages come to the driver at one time, then."""

Collectives = Mapping[str, tuple[tuple[int, ...], int]]


def word(collectives: Collectives, groups: int) -> int:
    """What a rank says when it has passed: alike for ranks that have issued as many collectives in the same groups.

    And that have made as many `groups`.
    """
    return crc32(repr((sorted(collectives.items()), groups)).encode())


def go_on(words: Collection[int | None], size: int) -> bool:
    """Whether `size` ranks begin the test that they were told of ahead. None: a rank that did not pass."""
    return len(words) == size and len(set(words)) == 1 and None not in words


class Peers:
    """The other ranks, as one of them reaches them."""

    def __init__(self, rank: int, inbox: socket | None, outboxes: Sequence[socket]) -> None:
        """`inbox` gets what the others write into theirs of the `outboxes`; None where there are no others."""
        self._rank = rank
        self._inbox = inbox
        self._outboxes = outboxes
        self._test = 0
        self._words: dict[int, dict[int, int]] = {}
        """By test and rank. A peer may be one test ahead: what it needed of this rank was its word."""

    def tell(self, test: int, word: int) -> None:
        """Say that this rank has passed `test`, which is so manieth of the world; the others have a moment to do so."""
        self._test, self._words = test, {test: {**self._words.get(test, {}), self._rank: word}, test + 1: {}}
        for outbox in self._outboxes:
            with suppress(OSError):  # The other is gone, which the driver finds.
                _send(outbox, _RECORD.pack(self._rank, test, word), MSG_DONTWAIT)
        self._read()
        self._listen(None, _MOMENT)

    def agree(self, driver: Connection) -> bool:
        """Wait until all have passed the test, alike; False: they have not, or the driver says something first."""
        self._listen(driver, None)
        return go_on(self._words[self._test].values(), self._size)

    @property
    def _size(self) -> int:
        return len(self._outboxes) + 1

    def _listen(self, driver: Connection | None, milliseconds: int | None) -> None:
        """Until all have spoken, or the driver has, or so much time has passed."""
        polled = poll()
        if driver is not None:
            polled.register(driver.fileno(), POLLIN)
        if self._inbox is not None:
            polled.register(_fileno(self._inbox), POLLIN)
        while len(self._words[self._test]) < self._size:
            ready = {descriptor for descriptor, _ in polled.poll(milliseconds)}
            if not ready or (driver is not None and driver.fileno() in ready):
                return
            if not self._read():
                polled.unregister(ready.pop())

    def _read(self) -> bool:
        """Take in what has come; False: nothing more will."""
        if self._inbox is None:
            return False
        try:
            data = _recv(self._inbox, 1 << 16, MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False  # The test has closed it.
        for rank, test, word in _RECORD.iter_unpack(data):
            if test in self._words:
                self._words[test][rank] = word
        return bool(data)


def connect(ranks: int) -> list[tuple[socket, socket]]:
    """For each rank, the end that it reads and the end that the others write; nothing for a rank alone."""
    return [socketpair() for _ in range(ranks)] if ranks > 1 else []


def receive(connection: Connection, ranks: int) -> list[tuple[socket, socket]]:
    """What `connect` has given another process, which sends it behind a message; EOFError where that ends."""
    ends = [socket(fileno=descriptor) for descriptor in fd_passing.receive(connection, 2 * ranks)]
    return list(zip(ends[::2], ends[1::2], strict=True))


def ends_of(rank: int, pairs: Sequence[tuple[socket, socket]]) -> list[socket]:
    """What `rank` needs of them: the end that it reads, and those that it writes; nothing for a rank alone."""
    return [pairs[rank][0], *(outbox for other, (_, outbox) in enumerate(pairs) if other != rank)] if pairs else []


def take(rank: int, pairs: Sequence[tuple[socket, socket]]) -> Peers:
    """What `rank` needs of them; the rest is closed in this process."""
    for other, (inbox, outbox) in enumerate(pairs):
        (outbox if other == rank else inbox).close()
    mine = ends_of(rank, pairs)
    return Peers(rank, mine[0] if mine else None, mine[1:])
