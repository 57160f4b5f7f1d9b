"""Authentication codes for the frames of a connection between two machines.

Both ends have a key that is used for this connection alone. The code of a frame covers its direction, number and
content, so frames that another process forges, changes, repeats, drops or reorders are detected. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

TAG = 16
"""Length of a code in bytes."""
_HEAD = struct.Struct("<BQ")


class ForgedFrame(ConnectionError):
    """A frame has a wrong authentication code or an impossible size."""

    def __init__(self) -> None:
        super().__init__(
            "a frame failed authentication: another process writes on the connection, or frames were lost, repeated or "
            "reordered"
        )


class FrameAuth:
    """Computes and checks the codes of one direction of a connection. Frames must be given in their order."""

    def __init__(self, key: bytes, direction: int) -> None:
        """`direction` is 0 or 1. The other end uses the same key, and the same direction for the same frames."""
        self._keyed = hashlib.blake2b(digest_size=TAG, key=key)
        self._direction = direction
        self._number = 0

    def tag(self, frame: bytes) -> bytes:
        """Return the code of the next frame."""
        code = self._keyed.copy()
        code.update(_HEAD.pack(self._direction, self._number))
        code.update(frame)
        self._number += 1
        return code.digest()

    def check(self, frame: bytes, tag: bytes | bytearray) -> None:
        """Raise :class:`ForgedFrame` unless `tag` is the code of `frame` as the next frame of the other end."""
        if not hmac.compare_digest(self.tag(frame), tag):
            raise ForgedFrame
