"""The store of a world whose interpreter has no torch: a file for each value, in the session's private folder.

It replaces torch's TCPStore for the plugin's own values (:class:`~pytest_accel.rank.signed_store.SignedStore`). Files
need no server, so rank 0 has no thread and may end first. The ranks must be on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from os import O_CREAT, O_RDONLY, O_TRUNC, O_WRONLY, close, fstat, getpid, makedirs, read, replace, unlink, write
from os import open as open_file
from os.path import exists
from threading import get_ident
from time import sleep

from pytest_accel.core.clock import PAUSES, monotonic

_SHORTEST_SLEEP = 0.0002
_LONGEST_SLEEP = 0.02
"""Seconds between two looks for a file: the first pause, and the longest one."""


class FolderStore:
    """A rank's access to the values of its world; the methods are those of torch's `Store` that the plugin uses."""

    def __init__(self, folder: str) -> None:
        """Create `folder` unless another rank has done so."""
        makedirs(folder, mode=0o700, exist_ok=True)
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        """Set `key` to `value`. Readers find the whole value or none."""
        path = self._path(key)
        draft = f"{path}.{getpid()}.{get_ident()}"
        descriptor = open_file(draft, O_WRONLY | O_CREAT | O_TRUNC, 0o600)
        try:
            rest = memoryview(value)
            while rest:
                rest = rest[write(descriptor, rest) :]
        finally:
            close(descriptor)
        replace(draft, path)

    def get(self, key: str) -> bytes:
        """Wait until `key` is set, and return its value."""
        pause = _SHORTEST_SLEEP
        while True:
            try:
                descriptor = open_file(self._path(key), O_RDONLY)
            except FileNotFoundError:
                sleep(pause)
                pause = min(2 * pause, _LONGEST_SLEEP)
                continue
            try:
                parts, size = [], fstat(descriptor).st_size
                while size > 0 and (part := read(descriptor, size)):
                    parts.append(part)
                    size -= len(part)
                return b"".join(parts)
            finally:
                close(descriptor)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all `keys` are set; raise RuntimeError, as torch does, after `timeout`."""
        began, pause = monotonic(), _SHORTEST_SLEEP
        while not self.check(keys):
            if monotonic() >= began + timeout.total_seconds() + PAUSES.since(began):
                raise RuntimeError(f"not all values were set within {timeout.total_seconds()} seconds")
            due = monotonic() + pause
            sleep(pause)
            PAUSES.notice(due)
            pause = min(2 * pause, _LONGEST_SLEEP)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` are set."""
        return all(exists(self._path(key)) for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return whether it was set."""
        try:
            unlink(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def _path(self, key: str) -> str:
        """Return the path of the value of `key`, which may have characters and a length that file names do not."""
        return f"{self._folder}/{sha256(key.encode()).hexdigest()}"
