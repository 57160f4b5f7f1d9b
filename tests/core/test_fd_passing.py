"""Tests of file descriptors that are passed to another process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from pytest_accel.core import fd_passing
from tests.descriptor_limit import free_descriptors, open_descriptors

COUNT = 20
"""Number of descriptors that are passed."""


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """Yield the two ends of a connection."""
    ours, theirs = Pipe()
    assert isinstance(ours, Connection)
    assert isinstance(theirs, Connection)
    with ours, theirs:
        yield ours, theirs


def test_descriptors_arrive_in_order(ends: tuple[Connection, Connection]) -> None:
    read, write = os.pipe()
    fd_passing.send(ends[0], [read] * (COUNT - 1) + [write])
    received = fd_passing.receive(ends[1], COUNT)
    assert len(received) == COUNT
    os.write(received[-1], b"data")
    assert os.read(received[0], 4) == b"data"
    assert not any(map(os.get_inheritable, received))
    for descriptor in (read, write, *received):
        os.close(descriptor)


def test_none_stay_open_if_not_all_can_be_received(ends: tuple[Connection, Connection]) -> None:
    before = open_descriptors()
    fd_passing.send(ends[0], [0] * COUNT)
    ends[0].send("the next message")
    with free_descriptors(10), pytest.raises(OSError, match=rf"Too many open files: \d+ of {COUNT} descriptors were "):
        fd_passing.receive(ends[1], COUNT)
    assert open_descriptors() <= before
    assert ends[1].recv() == "the next message"


def test_none_stay_open_if_the_other_end_is_closed(ends: tuple[Connection, Connection]) -> None:
    ends[0].close()
    before = open_descriptors()
    with pytest.raises(EOFError):
        fd_passing.receive(ends[1], COUNT)
    assert open_descriptors() <= before


def test_the_connection_keeps_blocking_if_sockets_have_a_default_timeout(ends: tuple[Connection, Connection]) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        fd_passing.send(ends[0], [0])
        [descriptor] = fd_passing.receive(ends[1], 1)
    finally:
        socket.setdefaulttimeout(before)
    os.close(descriptor)
    assert all(os.get_blocking(end.fileno()) for end in ends)
