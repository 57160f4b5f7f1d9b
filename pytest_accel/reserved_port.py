"""A reserved port: a script or framework can listen on it, and nothing else gets it meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DYNAMIC = (49152, 65535)
"""The ports that systems other than Linux assign automatically (IANA's dynamic ports, RFC 6335)."""
_FIRST = 20000
"""The first port to try; most services, which a machine may start later, have lower ports."""
_NODE_PORTS = 30000
"""The first of the ports that Kubernetes uses for services on its nodes (``--service-node-port-range``)."""


def hold() -> socket.socket:
    """Return a socket that reserves its port number for a TCP server, until the socket is closed.

    The port is outside the range from which the kernel assigns free ports (ip(7): ip_local_port_range). So nothing
    needs to be bound to it over TCP, and any server can listen there, whatever options it sets. The socket is bound to
    the same number over UDP, which keeps other sessions on the machine from choosing the port.

    If the kernel's range leaves no such port, the socket is bound over TCP and does not listen: a server can listen
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
    """Return the first and the last port that the kernel assigns automatically."""
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, _RANGE.read_text(encoding="utf-8").split())
        return first, last
    return _DYNAMIC


def _outside(first: int, last: int) -> Iterator[int]:
    """Yield the ports to try, in random order, if the kernel assigns those from `first` to `last`."""
    for ports in (range(last + 1, 65536), range(_FIRST, min(first, _NODE_PORTS))):
        yield from random.Random().sample(ports, len(ports))


def _bind_once(number: int) -> None:
    """Raise OSError if a TCP socket is bound to the port, or if old connections on it have not expired."""
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as server:
        if dual:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("", number))
