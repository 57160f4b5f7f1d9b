"""A port that a script can listen on, and that nothing else is given meanwhile."""

from __future__ import annotations

import socket


def hold() -> socket.socket:
    """A socket that is bound to a free port and does not listen: the port is held until it is closed.

    On Linux a server that sets SO_REUSEADDR, as torch's TCPStore does, may listen there all the same (ip(7)), while
    nobody who asks the kernel for a free port is given this one. On other systems such a server is refused, so there
    the port is let go of at once, and could be taken.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
