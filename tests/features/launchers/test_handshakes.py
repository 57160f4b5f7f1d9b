"""Tests of concurrent handshakes on a listening socket."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Generator, Iterator

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.features.launchers.handshakes import Handshakes

_TIMEOUT = 60


class _Listener(socket.socket):
    """A listening socket whose `accept` raises `error` unless this is 0."""

    error = 0
    once = True
    """True if `accept` raises the error only once."""

    def accept(self) -> tuple[socket.socket, object]:
        if not self.error:
            return super().accept()
        error = self.error
        if self.once:
            self.error = 0
        raise OSError(error, os.strerror(error))


@pytest.fixture
def listener() -> Iterator[_Listener]:
    with _Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def _greet(connection: socket.socket) -> Generator[bytes | int, bytes, bytes]:
    return (yield 5)


def _meet(listener: _Listener) -> bytes:
    """Return what is received from a connection to `listener`."""
    with (
        Handshakes(listener, _greet, 1) as handshakes,
        socket.create_connection(listener.getsockname(), _TIMEOUT) as caller,
    ):
        caller.sendall(b"hello")
        met = handshakes.wait(monotonic() + _TIMEOUT)
    assert met is not None
    met[0].close()
    return met[1]


@pytest.mark.parametrize("name", ["EAGAIN", "ECONNABORTED", "EPROTO", "EHOSTUNREACH", "ENETDOWN", "EPERM"])
def test_a_connection_that_fails_before_it_is_accepted_is_left_out(listener: _Listener, name: str) -> None:
    listener.error = getattr(errno, name)
    assert _meet(listener) == b"hello"


@pytest.mark.parametrize("name", ["EMFILE", "ENOBUFS"])
def test_a_lack_of_descriptors_or_memory_is_waited_for(
    listener: _Listener, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            listener.error = 0

    listener.error, listener.once = getattr(errno, name), False
    monkeypatch.setattr(time, "sleep", pause)
    assert _meet(listener) == b"hello"
    assert pauses == [0.1] * 3


def test_the_error_of_an_unusable_listener_is_raised(listener: _Listener) -> None:
    listener.error = errno.EINVAL
    with pytest.raises(OSError, match="Invalid argument"):
        _meet(listener)
