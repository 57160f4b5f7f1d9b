"""Authentication codes for the frames of a connection between two machines.

Both ends have a key of this connection alone. The code of a frame covers its direction, its number and its content, so
a frame that somebody else has made, changed, repeated, left out or moved is found. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

TAG = 16
"""Bytes of a code."""
_HEAD = struct.Struct("<BQ")


class ForgedFrame(ConnectionError):
    """A frame has a wrong code, or a size that no frame has."""

    def __init__(self) -> None:
        super().__init__(
            "a frame failed authentication: another process writes on the connection, or frames were lost, repeated or "
            "reordered"
        )


class FrameAuth:
    """The codes of one direction of a connection, in the order of its frames."""

    def __init__(self, key: bytes, direction: int) -> None:
        """`direction` is 0 or 1; the other end uses the same key, and the same number for the same frames."""
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
        """Raise :class:`ForgedFrame` unless `frame` is the next one that the other end has sent."""
        if not hmac.compare_digest(self.tag(frame), tag):
            raise ForgedFrame
