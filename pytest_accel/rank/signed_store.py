"""Values in a world's store that only a rank of the world can have written.

torch's TCPStore lets every process that reaches its port set any key. So what this plugin keeps there is signed. A
world's ranks share a secret, which comes to them with the world's spec and never enters the store. A value is signed
together with its name, so that a value that was read there cannot be used under another name.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_DIGEST = "sha256"
_SIZE = 32
"""Bytes of a signature."""


class ForgedValueError(Exception):
    """A value in the store lacks a rank's signature. Not a RuntimeError, as the errors of torch's stores are."""


class SignedStore:
    """A rank's access to the signed values of its world."""

    def __init__(self, store: Store, secret: bytes, place: str) -> None:
        """`secret` is the world's; `place` says where the store is, for error messages."""
        self._store = store
        self._secret = secret
        self._place = place

    def set(self, name: str, value: bytes) -> None:
        """Set `name` to `value`."""
        self._store.set(name, self._signature(name, value) + value)  # type: ignore[arg-type]

    def get(self, name: str) -> bytes:
        """Return the value of `name`, once it is set; raise :class:`ForgedValueError` where no rank has written it."""
        __tracebackhide__ = True
        found = self._store.get(name)
        signature, value = found[:_SIZE], found[_SIZE:]
        if not hmac.compare_digest(signature, self._signature(name, value)):
            raise ForgedValueError(
                f"{name!r} in the store at {self._place} was not written by a rank of this test: its signature is "
                "wrong, and its value has not been used; another process has written to the store"
            )
        return value

    def wait(self, names: Sequence[str], timeout: timedelta) -> None:
        """Wait until all `names` are set, by whomever; RuntimeError (torch's) after `timeout`."""
        self._store.wait(list(names), timeout)

    def check(self, names: Sequence[str]) -> bool:
        """Return whether all `names` are set, by whomever."""
        return bool(self._store.check(list(names)))

    def delete(self, name: str) -> None:
        """Remove `name`; no-op where it is not set."""
        self._store.delete_key(name)

    def _signature(self, name: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, b"%s\0%s" % (name.encode(), value), _DIGEST)
