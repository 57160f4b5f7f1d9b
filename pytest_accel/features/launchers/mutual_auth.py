"""Mutual authentication of two processes over TCP: a listener, and a caller that has a rank.

Under a launcher, rank 0 listens. In a session on a cluster, the controller does, and the rank is the number of a node.

Both ends prove that they know a secret by an HMAC of their role and rank, the job, and a random number of each end. The
caller sends its random number first, and nothing more until the listener has proved its knowledge. So a proof cannot be
used with another peer, in the other role, or a second time. Until then, only messages of fixed size are read; then
JSON messages and frames, each with a code made with a key of this connection (`core/frame_auth.py`).

The secret must be impossible to guess: a process that has talked to either end can check guesses offline.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from pytest_accel.core.frame_auth import TAG, ForgedFrame, FrameAuth
from pytest_accel.core.handshakes import Handshake, Refused

_MAGIC = b"accel-1\n"
_RANDOM = 32
_CALL = struct.Struct(f"<8s{_RANDOM}s")
_ANSWER = struct.Struct(f"<8s{_RANDOM}s32s")
_PROOF = struct.Struct("<?I32s")
"""A flag that is True if the listener's proof was right, the caller's rank, and the caller's proof."""
_NO_PROOF = bytes(32)
_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 24
"""Maximum size, in bytes, of a message of an authenticated peer in the greeting; command lines may be long."""


class WrongSecret(Refused):
    """The listener has another secret, or belongs to another job."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of an authenticated connection."""

    rank: int
    """The caller's rank."""
    key: bytes
    """The key of the connection, from which `key_for` derives keys."""


def admit_caller(
    secret: bytes, job: Sequence[str], ranks: Container[int], on_wrong_secret: Callable[[int], None]
) -> Handshake[Peer]:
    """Authenticate a caller, as the listener.

    `on_wrong_secret` gets the rank that a caller with another secret claims to have.
    """
    magic, theirs = _CALL.unpack((yield _CALL.size))
    if magic != _MAGIC:
        raise Refused("speaks another protocol")
    ours = secrets.token_bytes(_RANDOM)
    yield _ANSWER.pack(_MAGIC, ours, _mac(secret, "listener", job, 0, theirs, ours))
    agrees, rank, proof = _PROOF.unpack((yield _PROOF.size))
    if rank not in ranks:
        raise Refused(f"claims a rank that does not exist: {rank}")
    if not agrees:
        on_wrong_secret(rank)
        raise WrongSecret
    if not hmac.compare_digest(proof, _mac(secret, "caller", job, rank, theirs, ours)):
        raise Refused("does not know the secret")
    return Peer(rank, _mac(secret, "connection", job, rank, theirs, ours))


def prove_caller(secret: bytes, job: Sequence[str], rank: int) -> Handshake[Peer]:
    """Authenticate to the listener as the caller of `rank`; raise :class:`WrongSecret` if the listener cannot do so."""
    ours = secrets.token_bytes(_RANDOM)
    yield _CALL.pack(_MAGIC, ours)
    magic, theirs, proof = _ANSWER.unpack((yield _ANSWER.size))
    if magic != _MAGIC:
        raise Refused("speaks another protocol")
    if not hmac.compare_digest(proof, _mac(secret, "listener", job, 0, ours, theirs)):
        yield _PROOF.pack(False, rank, _NO_PROOF)
        raise WrongSecret
    yield _PROOF.pack(True, rank, _mac(secret, "caller", job, rank, ours, theirs))
    return Peer(rank, _mac(secret, "connection", job, rank, ours, theirs))


def _mac(secret: bytes, purpose: str, job: Sequence[str], rank: int, callers: bytes, listeners: bytes) -> bytes:
    # JSON separates the values, so different values never result in the same text.
    about = json.dumps([purpose, list(job), rank, callers.hex(), listeners.hex()])
    return hmac.digest(secret, about.encode(), "sha256")


def key_for(peer: Peer, purpose: str) -> bytes:
    """Return a key of the connection for one purpose."""
    return hmac.digest(peer.key, purpose.encode(), "sha256")


class Messages:
    """The JSON messages of the greeting after the two ends have authenticated each other."""

    def __init__(self, peer: Peer, *, caller: bool) -> None:
        key = key_for(peer, "greeting")
        self._sent = FrameAuth(key, int(caller))
        self._received = FrameAuth(key, int(not caller))

    def pack(self, value: object) -> bytes:
        """Return the bytes that carry `value`."""
        data = json.dumps(value).encode()
        frame = _LENGTH.pack(len(data)) + data
        return frame + self._sent.tag(frame)

    def receive(self) -> Handshake[object]:
        """Wait for the other end's next message; raise :class:`ForgedFrame` if its authentication code is wrong."""
        head = yield _LENGTH.size
        (length,) = _LENGTH.unpack(head)
        if length > _LONGEST:
            raise ForgedFrame
        rest = yield length + TAG
        self._received.check(head + rest[:length], rest[length:])
        return json.loads(rest[:length])
