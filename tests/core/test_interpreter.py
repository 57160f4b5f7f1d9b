"""Tests of `pytest_accel.core.interpreter`."""

from __future__ import annotations

import socket

import pytest

from pytest_accel.core.interpreter import hold_port


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT], ids=["address", "port"])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["ipv4", "dual"])
def test_a_server_can_listen_on_a_held_port_again_and_again(option: int, family: socket.AddressFamily) -> None:
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    with hold_port() as held:
        number = held.getsockname()[1]
        for _ in range(2):  # The first server leaves a connection in TIME_WAIT.
            with socket.socket(family) as server:
                server.setsockopt(socket.SOL_SOCKET, option, 1)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                server.bind(("", number))
                server.listen()
                with socket.create_connection(("127.0.0.1", number)):
                    server.accept()[0].close()
