"""Tests of reserved ports, to which servers bind by themselves with different socket options."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest

from pytest_accel import reserved_port

REUSE = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)


@pytest.fixture
def held() -> Iterator[socket.socket]:
    """Yield the socket that holds a reserved port."""
    with reserved_port.hold() as made:
        yield made


def serve(number: int, *options: int, family: socket.AddressFamily = socket.AF_INET) -> None:
    """Listen on the port `number` and accept one connection; raise OSError if the port is in use."""
    with socket.socket(family) as server:
        for option in options:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("", number))
        server.listen()
        with socket.create_connection(("127.0.0.1", number)):
            # The end that closes first stays in TIME_WAIT, and keeps the port in use.
            server.accept()[0].close()


@pytest.mark.parametrize("options", [(), REUSE[:1], REUSE[1:], REUSE], ids=["plain", "address", "port", "both"])
def test_any_server_can_listen_on_a_reserved_port(held: socket.socket, options: tuple[int, ...]) -> None:
    number = held.getsockname()[1]
    families = [socket.AF_INET, *([socket.AF_INET6] if socket.has_dualstack_ipv6() else [])]
    for family in families:
        with reserved_port.hold() as another:
            serve(another.getsockname()[1], *options, family=family)
    serve(number, *options)


def test_a_port_is_held_although_the_kernel_may_assign_every_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserved_port, "_kernels_range", lambda: (1024, 65535))
    with reserved_port.hold() as held:
        number = held.getsockname()[1]
        if sys.platform == "linux":
            serve(number, socket.SO_REUSEADDR)
            with pytest.raises(OSError, match="in use"):
                serve(number)
        serve(number, *REUSE)
