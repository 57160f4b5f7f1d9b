"""Authentication of two processes over TCP: the user's secret, the proofs that both know it, and the seals of frames.

One process listens, and the other calls it and has a rank. Under a launcher, rank 0 listens. In a session on a cluster,
the controller does, and the rank is the number of a machine.

Both ends prove that they know a secret by an HMAC of their role and rank, the job, and a random number of each end. The
caller sends its random number first, and nothing more until the listener has proved its knowledge. So a proof cannot be
used with another peer, in the other role, or a second time. Until then, only records of fixed size are read; then
frames, each with a code that is made with a key of this connection alone. The code covers the direction, number and
content of the frame, so frames that another process forges, changes, repeats, drops or reorders are detected. Nothing
is encrypted.

The secret must be impossible to guess: a process that has talked to either end can check guesses offline.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import struct
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from pytest_accel.features.launchers.handshakes import Handshake, Refused
from pytest_accel.messages.struct_messages import LENGTH, frame

VARIABLE = "PYTEST_ACCEL_SECRET"
FILE = "~/.pytest-accel-secret"
NAMES = f"{VARIABLE} or {FILE}"
HOW_TO_MAKE_ONE = f"(umask 077; python3 -c 'import secrets; print(secrets.token_hex())' > {FILE})"
_SHORTEST = 16
"""Minimum number of characters: any process can ask for a proof over the network, and check guesses with it."""
_LONGEST = 4096
"""Maximum number of bytes read from the file."""

_MAGIC = b"accel-2\n"
_RANDOM = 32
_CALL = struct.Struct(f"<8s{_RANDOM}s")
_ANSWER = struct.Struct(f"<8s{_RANDOM}s32s")
_PROOF = struct.Struct("<?I32s")
"""A flag that is True if the listener's proof was right, the caller's rank, and the caller's proof."""
_NO_PROOF = bytes(32)

_CODE = 16
"""Length, in bytes, of the code at the end of a frame."""
_NUMBER = struct.Struct("<BQ")
"""Direction and number of a frame."""


class SecretError(Exception):
    """The secret is not usable; the message says why, and what to do."""


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """Return the secret: the value of :data:`VARIABLE`, else the content of :data:`FILE`; None if there is neither.

    Raise :class:`SecretError` if it is too short, or if other users can read it.
    """
    text, origin = environ.get(VARIABLE, ""), VARIABLE
    if not text:
        found = _read_file(os.path.expanduser(FILE))
        if found is None:
            return None
        text, origin = found, FILE
    text = text.strip()
    if len(text) < _SHORTEST:
        raise SecretError(
            f"the secret in {origin} has {len(text)} characters; at least {_SHORTEST} are needed, so that nobody "
            f"guesses it. To make one: {HOW_TO_MAKE_ONE}"
        )
    return text.encode(errors="surrogateescape")


def _read_file(path: str) -> str | None:
    if not os.path.isabs(path):
        return None  # There is no home directory.
    try:
        # O_NONBLOCK: opening a named pipe must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SecretError(f"the secret in {path} cannot be read: {error.strerror}") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise SecretError(f"{path} is not a regular file: a secret is expected there")
        if facts.st_uid != os.geteuid():
            raise SecretError(f"the secret in {path} belongs to user {facts.st_uid}, and not to user {os.geteuid()}")
        if facts.st_mode & 0o077:
            mode = stat.S_IMODE(facts.st_mode)
            raise SecretError(f"the secret in {path} is open to other users (mode {mode:04o}): chmod 600 {path}")
        return os.read(descriptor, _LONGEST).decode(errors="surrogateescape")
    finally:
        os.close(descriptor)


class WrongSecret(Refused):
    """The listener has another secret, or belongs to another job."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of an authenticated connection."""

    rank: int
    """The caller's rank."""
    key: bytes
    """The key of the connection, which nobody else can compute."""


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


class ForgedFrame(ConnectionError):
    """A frame has a wrong authentication code or an impossible size."""

    def __init__(self) -> None:
        super().__init__(
            "a frame failed authentication: another process writes on the connection, or frames were lost, repeated or "
            "reordered"
        )


class SealedFrames:
    """The frames of one connection, each with its code, at one end. They must be packed and taken in their order."""

    def __init__(self, peer: Peer, *, caller: bool) -> None:
        """`caller` is True at the caller's end of the connection to `peer`."""
        self.longest = 1 << 24
        """Maximum number of bytes in a received frame; command lines in a greeting may be long."""
        self._keyed = hashlib.blake2b(digest_size=_CODE, key=peer.key)
        self._caller = caller
        self._sent = self._received = 0
        """Number of frames so far."""

    def pack(self, data: bytes) -> bytes:
        """Return the frame that carries `data`."""
        framed = frame(data)
        code = self._code(framed, self._sent, self._caller)
        self._sent += 1
        return framed + code

    def missing(self, received: bytes | bytearray, at: int = 0) -> int:
        """Return how many bytes of the frame that begins in `received` at `at` are missing.

        Raise :class:`ForgedFrame` if it is too long: waiting for all of it would delay the detection.
        """
        there = len(received) - at
        if there < LENGTH.size:
            return LENGTH.size - there
        (length,) = LENGTH.unpack_from(received, at)
        if not 0 <= length <= self.longest:
            raise ForgedFrame
        return max(0, LENGTH.size + int(length) + _CODE - there)

    def take(self, received: bytes | bytearray, at: int = 0) -> tuple[bytes, int]:
        """Return the data of the complete frame at `at`, and the position after it.

        Raise :class:`ForgedFrame` if its code is wrong.
        """
        end = at + LENGTH.size + int(LENGTH.unpack_from(received, at)[0])
        framed = bytes(received[at:end])
        code = self._code(framed, self._received, not self._caller)
        if not hmac.compare_digest(code, received[end : end + _CODE]):
            raise ForgedFrame
        self._received += 1
        return framed[LENGTH.size :], end + _CODE

    def receive(self) -> Handshake[bytes]:
        """Wait for the other end's next frame, and return its data."""
        received = b""
        while missing := self.missing(received):
            received += yield missing
        return self.take(received)[0]

    def _code(self, framed: bytes, number: int, caller: bool) -> bytes:
        code = self._keyed.copy()
        code.update(_NUMBER.pack(caller, number))
        code.update(framed)
        return code.digest()
