"""Unix sockets between processes of one user: the user at the other end of every connection is checked.

The path of a socket proves nothing: whoever may write one of its parent folders can put another socket in its place.
The kernel tells which user is at the other end (unix(7): SO_PEERCRED; getpeereid(3) elsewhere, which was not tried).
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
"""Process, user and group."""
_accept = socket._accept  # type: ignore[attr-defined]


def listen(path: str, backlog: int) -> socket:
    """Return a listening socket at `path`; OSError where there is something of this name."""
    listener = socket(AF_UNIX)
    try:
        listener.bind(path)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: str) -> socket:
    """Return a connection to `path`; PermissionError where another user listens there, OSError where nobody does."""
    call = socket(AF_UNIX)
    call.setblocking(True)  # Whatever default timeout the tests have set.
    try:
        call.connect(path)
        uid = peer_uid(call)
        if not _trusted(uid):
            raise PermissionError(errno.EPERM, f"user {uid} listens there, and not user {geteuid()}", path)
    except OSError:
        call.close()
        raise
    return call


def accept(listener: socket) -> socket:
    """Wait for a connection from a process of this user, and return it; connections of other users are closed.

    `listener.accept()` would use `socket.socket` as the test has replaced it, and the default timeout that it has set.
    """
    while True:
        call = socket(fileno=_accept(listener)[0])
        call.setblocking(True)
        if is_own(call):
            return call
        call.close()


def is_own(call: socket) -> bool:
    """Return whether the process at the other end of `call` is this user's, or root's."""
    try:
        return _trusted(peer_uid(call))
    except OSError:  # Closed already, which some systems answer with an error.
        return False


def peer_uid(call: socket) -> int:
    """Return the user at the other end of `call`: of the one who listened, or of the one who connected."""
    if sys.platform == "linux":
        credentials = call.getsockopt(SOL_SOCKET, SO_PEERCRED, _CREDENTIALS.size)
        uid: int = _CREDENTIALS.unpack(credentials)[1]
    else:
        found, group = ctypes.c_uint32(), ctypes.c_uint32()
        if ctypes.CDLL(None, use_errno=True).getpeereid(call.fileno(), ctypes.byref(found), ctypes.byref(group)):
            raise OSError(ctypes.get_errno(), "the user of the other end is unknown")
        uid = found.value
    return uid


def _trusted(uid: int) -> bool:
    # Root may do anything with this process anyway; a test that gives up root's rights is still its driver's.
    return uid in (geteuid(), 0)
