"""A port that a script or framework can listen on, and that nothing else is given meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DYNAMIC = (49152, 65535)
"""The ports that systems other than Linux give away by themselves (IANA's dynamic ports, RFC 6335)."""
_FIRST = 20000
"""Below are the ports of most services that a machine may start later."""
_NODE_PORTS = 30000
"""From here on, Kubernetes takes ports of its nodes for services (``--service-node-port-range``)."""


def hold() -> socket.socket:
    """Return a socket whose port number is held, for servers over TCP, until the socket is closed.

    The port is one that the kernel gives to nobody who asks for a free one (ip(7): ip_local_port_range), so nothing
    needs to be bound to it over TCP, and any server can listen there, whatever options it sets. The socket is bound to
    the same number over UDP: this keeps other sessions on the machine from choosing the port.

    Where the kernel's range leaves no such port, the socket is bound over TCP and does not listen: a server can listen
    on its port if it sets SO_REUSEADDR or SO_REUSEPORT (socket(7)).
    """
    for number in _outside(*_kernels_range()):
        held = socket.socket(type=socket.SOCK_DGRAM)
        try:
            held.bind(("", number))
            _bind_once(number)
        except OSError:
            held.close()
        else:
            return held
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("", 0))
    return held


def _kernels_range() -> tuple[int, int]:
    """Return the first and the last port that the kernel gives away by itself."""
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, _RANGE.read_text().split())
        return first, last
    return _DYNAMIC


def _outside(first: int, last: int) -> Iterator[int]:
    """Yield the ports to try where the kernel gives away those from `first` to `last`, in random order."""
    for ports in (range(last + 1, 65536), range(_FIRST, min(first, _NODE_PORTS))):
        yield from random.Random().sample(ports, len(ports))


def _bind_once(number: int) -> None:
    """Raise OSError where something is bound to the port over TCP, or its last connections have not expired."""
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as server:
        if dual:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("", number))
