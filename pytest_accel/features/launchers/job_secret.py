"""The secret by which the processes of a job on several machines know each other, and the key that follows from it."""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence

VARIABLE = "PYTEST_ACCEL_SECRET"
HOW_TO_MAKE_ONE = f"export {VARIABLE}=$(python3 -c 'import secrets; print(secrets.token_hex())')"
SHORTEST = 16
"""Minimum number of characters: an attacker who reads the network can check guesses."""


class WrongSecret(ConnectionError):
    """The listening process did not accept this process: it has another secret or job, or is no driver."""


def driver_key(secret: str, job: Sequence[str]) -> bytes:
    """Return the private key of the driver in `job`, from which its public key follows.

    Only processes that know `secret` have either key.
    """
    # JSON separates the values, so different values never result in the same text.
    message = json.dumps(["pytest-accel", *job]).encode()
    return hmac.digest(secret.encode(errors="surrogateescape"), message, "sha256")
