"""Unix sockets between processes of one user, with a check of the user at the other end of every connection.

The path of a socket does not identify its owner: anybody who may write to one of its parent folders can replace the
socket. The kernel reports the user at the other end (unix(7): SO_PEERCRED; on other systems than Linux getpeereid(3),
which was not tried).
"""

from __future__ import annotations

import ctypes
import errno
import sys
from os import geteuid
from socket import AF_UNIX, SOL_SOCKET, socket
from struct import Struct

if sys.platform == "linux":
    from socket import SO_PEERCRED

_CREDENTIALS = Struct("=iII")
"""Pid, user id and group id."""
_accept = socket._accept  # type: ignore[attr-defined]


def listen(path: str, backlog: int) -> socket:
    """Return a listening socket at `path`; raise OSError if the path exists."""
    listener = socket(AF_UNIX)
    try:
        listener.bind(path)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: str) -> socket:
    """Return a connection to `path`.

    Raise PermissionError if another user listens there, and OSError if no process does.
    """
    connection = socket(AF_UNIX)
    connection.setblocking(True)  # Tests may have set a default timeout.
    try:
        connection.connect(path)
        uid = peer_uid(connection)
        if not _trusted(uid):
            raise PermissionError(errno.EPERM, f"user {uid} listens there instead of user {geteuid()}", path)
    except OSError:
        connection.close()
        raise
    return connection


def accept(listener: socket) -> socket:
    """Wait for a connection from a process of this user, and return it; connections of other users are closed.

    Tests may replace `socket.socket` and set a default timeout; `listener.accept()` would use both.
    """
    while True:
        connection = socket(fileno=_accept(listener)[0])
        connection.setblocking(True)
        if is_own(connection):
            return connection
        connection.close()


def is_own(connection: socket) -> bool:
    """Return whether the process at the other end of `connection` belongs to this user or root."""
    try:
        return _trusted(peer_uid(connection))
    except OSError:  # Some systems raise it if the connection is already closed.
        return False


def peer_uid(connection: socket) -> int:
    """Return the user id of the process at the other end of `connection`."""
    if sys.platform == "linux":
        credentials = connection.getsockopt(SOL_SOCKET, SO_PEERCRED, _CREDENTIALS.size)
        uid: int = _CREDENTIALS.unpack(credentials)[1]
    else:
        found, group = ctypes.c_uint32(), ctypes.c_uint32()
        if ctypes.CDLL(None, use_errno=True).getpeereid(connection.fileno(), ctypes.byref(found), ctypes.byref(group)):
            raise OSError(ctypes.get_errno(), "the user of the other end is unknown")
        uid = found.value
    return uid


def _trusted(uid: int) -> bool:
    # Root controls this process anyway, and a test that gives up root's rights still has a driver that is root.
    return uid in (geteuid(), 0)
