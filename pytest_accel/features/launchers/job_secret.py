"""The secret by which the processes of a job on several machines know each other, and the keys that follow from it."""

from __future__ import annotations

import hmac
import json
import os
import stat
from collections.abc import Mapping, Sequence

VARIABLE = "PYTEST_ACCEL_SECRET"
FILE = "~/.pytest-accel-secret"
NAMES = f"{VARIABLE} or {FILE}"
HOW_TO_MAKE_ONE = f"(umask 077; python3 -c 'import secrets; print(secrets.token_hex())' > {FILE})"
_SHORTEST = 16
"""Minimum number of characters: an attacker who reads the network can check guesses."""
_LONGEST = 4096
"""Maximum number of bytes read from the file."""


class SecretError(Exception):
    """The secret is not usable; the message says why, and what to do."""


class WrongSecret(ConnectionError):
    """The listening process did not accept this process: it has another secret or job, or is no driver."""


def driver_key(secret: bytes, job: Sequence[str]) -> bytes:
    """Return the private key of the driver in `job`, from which its public key follows.

    Only processes that know `secret` have either key.
    """
    # JSON separates the values, so different values never result in the same text.
    return hmac.digest(secret, json.dumps(["pytest-accel", *job]).encode(), "sha256")


def mixed(random: bytes, users: bytes) -> bytes:
    """Return a secret derived from both, since every process that reaches the agents' store can read `random`."""
    return hmac.digest(random, users, "sha256")


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
