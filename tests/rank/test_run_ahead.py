"""Tests of run-ahead: ranks exchange checksums after a test, and begin the next one if all are equal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from pytest_accel.rank.run_ahead import PeerChannel, checksum, connect, may_run_ahead, sockets_of

SAME = {"0": ((0, 1), 3)}


def test_ranks_run_ahead_only_if_all_checksums_are_equal() -> None:
    expected = checksum(SAME, 1)
    assert may_run_ahead([expected, checksum(dict(SAME), 1)], 2)
    assert not may_run_ahead([expected, checksum({"0": ((0, 1), 4)}, 1)], 2)
    assert not may_run_ahead([expected, checksum(SAME, 2)], 2)
    assert not may_run_ahead([expected, None], 2)
    assert not may_run_ahead([None, None], 2)
    assert not may_run_ahead([expected], 2)


class Ranks:
    """The peer channels of all ranks of a world, in this process, each with its own connection to a driver."""

    def __init__(self, size: int) -> None:
        pairs = connect(size)
        self.sockets = [end for pair in pairs for end in pair]
        self.peers = [PeerChannel(rank, sockets_of(rank, pairs)) for rank in range(size)]
        self.drivers: list[tuple[Connection, Connection]] = [Pipe() for _ in range(size)]

    def close(self) -> None:
        for end in self.sockets:
            end.close()
        for here, there in self.drivers:
            here.close()
            there.close()


@pytest.fixture(params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Provide worlds of one, two and four ranks."""
    made = Ranks(request.param)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Provide a world of two ranks."""
    made = Ranks(2)
    yield made
    made.close()


def test_ranks_with_equal_checksums_agree(ranks: Ranks) -> None:
    for test in range(1, 20):
        for rank in ranks.peers:
            rank.announce(test, 7)
        assert all(
            rank.wait_for_agreement(driver) for rank, (driver, _) in zip(ranks.peers, ranks.drivers, strict=True)
        )


def test_ranks_with_different_checksums_do_not_agree(pair: Ranks) -> None:
    for number, rank in enumerate(pair.peers):
        rank.announce(1, number)
    assert not any(rank.wait_for_agreement(driver) for rank, (driver, _) in zip(pair.peers, pair.drivers, strict=True))


def test_a_message_of_the_driver_ends_the_wait_for_a_peer(pair: Ranks) -> None:
    pair.peers[0].announce(1, 7)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(pair.peers[0].wait_for_agreement(pair.drivers[0][0])))
    thread.start()
    pair.drivers[0][1].send("another test")
    thread.join()
    assert answers == [False]


def test_a_peer_may_announce_the_next_test_early(pair: Ranks) -> None:
    slow, fast = pair.peers
    fast.announce(1, 7)
    slow.announce(1, 7)
    assert fast.wait_for_agreement(pair.drivers[1][0])
    fast.announce(2, 8)
    assert slow.wait_for_agreement(pair.drivers[0][0])
    slow.announce(2, 8)
    assert slow.wait_for_agreement(pair.drivers[0][0])
    assert fast.wait_for_agreement(pair.drivers[1][0])


def test_checksums_of_an_earlier_test_are_ignored(pair: Ranks) -> None:
    one, other = pair.peers
    one.announce(1, 7)  # The other rank failed.
    other.announce(2, 9)
    one.announce(2, 9)
    assert one.wait_for_agreement(pair.drivers[0][0])
    assert other.wait_for_agreement(pair.drivers[1][0])


def test_a_closed_driver_connection_ends_the_wait_for_a_peer_that_has_exited(pair: Ranks) -> None:
    _, others, its, _ = pair.sockets
    others.close()
    its.close()
    pair.peers[0].announce(1, 7)
    pair.drivers[0][1].close()
    assert not pair.peers[0].wait_for_agreement(pair.drivers[0][0])
