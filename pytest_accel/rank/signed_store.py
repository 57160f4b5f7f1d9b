"""Values in a world's store that only a rank of the world can have written.

torch's TCPStore lets every process that reaches its port set any key. So pytest-accel signs its own values. A world's
ranks share a secret, which they receive with the world's spec and never write to the store. The signature covers the
name too, so that another process cannot copy a value to another name.

Where torch is not installed, files in the session's private folder take the place of the TCPStore. They need no server,
so rank 0 has no thread and may end first. The ranks must be on one machine.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from os import makedirs, replace, unlink
from time import sleep
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_DIGEST = "sha256"
_SIZE = 32
"""Bytes of a signature."""
_COUNT_SIZE = 4
"""Bytes of the number of further parts, which precede the first part of a value."""
_PART = 4 << 20
"""Maximum size of a part in bytes: torch's store ends the connection of a client that sends more than 8 MiB at once."""
_INTERVAL = 0.001
"""Seconds between two looks for a file of a `FolderStore`."""
_open = open  # A test may replace it.


class ForgedValueError(Exception):
    """A value in the store has no valid signature. Not a RuntimeError, so that it differs from torch's store errors."""


class SignedStore:
    """A rank's access to the signed values of its world."""

    def __init__(self, store: Store | FolderStore, secret: bytes) -> None:
        """`secret` is the world's secret."""
        self._store = store
        self._secret = secret

    def set(self, name: str, value: bytes) -> list[str]:
        """Set `name` to `value`, in parts if it is large; return the keys that :meth:`delete` removes."""
        further = [f"{name}/{start}" for start in range(_PART, len(value), _PART)]
        for number, part in enumerate(further, 1):
            self._set(part, value[number * _PART : (number + 1) * _PART])
        # Set the first part last: a rank that finds it must find the others.
        self._set(name, len(further).to_bytes(_COUNT_SIZE, "big") + value[:_PART])
        return [name, *further]

    def _set(self, name: str, value: bytes) -> None:
        self._store.set(name, self._signature(name, value) + value)  # type: ignore[arg-type]

    def get(self, name: str) -> bytes:
        """Wait until `name` is set and return its value; raise :class:`ForgedValueError` if no rank has written it."""
        __tracebackhide__ = True
        first = self._get(name)
        count = int.from_bytes(first[:_COUNT_SIZE], "big")
        further = [self._get(f"{name}/{number * _PART}") for number in range(1, count + 1)]
        return b"".join([first[_COUNT_SIZE:], *further])

    def _get(self, name: str) -> bytes:
        __tracebackhide__ = True
        found = self._store.get(name)
        signature, value = found[:_SIZE], found[_SIZE:]
        if not hmac.compare_digest(signature, self._signature(name, value)):
            raise ForgedValueError(
                f"{name!r} in the world's store was not written by a rank of this test: its signature is wrong, and "
                "its value has not been used; another process has written to the store"
            )
        return value

    def delete(self, keys: list[str]) -> None:
        """Remove the `keys` of values that this rank has set, also from the list."""
        while keys:
            self._store.delete_key(keys.pop())

    def _signature(self, name: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, b"%s\0%s" % (name.encode(), value), _DIGEST)


class FolderStore:
    """The store of a world whose interpreter has no torch: a file for each value.

    It has the methods of torch's `Store` that the plugin uses.
    """

    def __init__(self, folder: str) -> None:
        """Create `folder` unless another rank has done so."""
        makedirs(folder, mode=0o700, exist_ok=True)
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        """Set `key` to `value`. Readers find the whole value or none."""
        path = self._path(key)
        draft = f"{path}.new"  # Each key has one writer.
        with _open(draft, "wb") as file:
            file.write(value)
        replace(draft, path)

    def get(self, key: str) -> bytes:
        """Wait until `key` is set, and return its value."""
        while True:
            try:
                with _open(self._path(key), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                sleep(_INTERVAL)

    def delete_key(self, key: str) -> None:
        """Remove `key`."""
        unlink(self._path(key))

    def _path(self, key: str) -> str:
        """Return the path of the value of `key`, which may have characters and a length that file names cannot have."""
        return f"{self._folder}/{sha256(key.encode()).hexdigest()}"
