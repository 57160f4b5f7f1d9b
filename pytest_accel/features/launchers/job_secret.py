"""The secret by which the processes of a job on several machines know each other, and the key that follows from it."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence

VARIABLE = "PYTEST_ACCEL_SECRET"
HOW_TO_MAKE_ONE = f"export {VARIABLE}=$(python3 -c 'import secrets; print(secrets.token_hex())')"
_SHORTEST = 16
"""Minimum number of characters: an attacker who reads the network can check guesses."""


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


def read_secret(environ: Mapping[str, str]) -> bytes:
    """Return the value of :data:`VARIABLE`, empty if it is not set; raise :class:`SecretError` if it is too short."""
    text = environ.get(VARIABLE, "").strip()
    if 0 < len(text) < _SHORTEST:
        raise SecretError(
            f"the secret in {VARIABLE} has {len(text)} characters; at least {_SHORTEST} are needed, so that nobody "
            f"guesses it. To make one: {HOW_TO_MAKE_ONE}"
        )
    return text.encode(errors="surrogateescape")
