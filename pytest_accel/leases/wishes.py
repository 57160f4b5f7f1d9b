"""What sessions wait for, made known to one another in the lock folder.

In its folder ``wants`` there is one file for each session that waits: which devices it would take, and since when. A
session keeps its own file fresh; one that has not been touched for two seconds counts for nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from pytest_accel.clock import monotonic
from pytest_accel.leases.folder import open_file, prepare_folder, read, unusable, write

_REFRESH = 0.5
_STALE = 2.0
_ABANDONED = 60.0


class Wishes:
    """What one session waits for, and what the others do. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the lock folder; :class:`~pytest_accel.leases.folder.LockFolderError` where it cannot be used."""
        self._folder = folder / "wants"
        self.prepare()
        self._file = self._folder / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        self._descriptor: int | None = None
        self._said: dict[str, float] = {}
        self._touched = 0.0

    def prepare(self) -> None:
        """Make the folder, where something has cleaned it away."""
        prepare_folder(self._folder)

    def want(self, since: Mapping[str, float]) -> None:
        """Tell the other sessions which devices this one waits for, and since when (seconds since the epoch).

        Replaces what was said before; an empty mapping withdraws it. Call it at least every second while it holds.
        Raises :class:`~pytest_accel.leases.folder.LockFolderError` where it cannot be written.
        """
        now = monotonic()
        if since == self._said and (not since or now - self._touched < _REFRESH):
            return
        try:
            if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
                os.close(self._descriptor)
                self._descriptor = None
            if self._descriptor is None:
                access = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self._file, access, 0o644)
                os.fchmod(self._descriptor, 0o644)
            write(self._descriptor, dict(since))
        except OSError as error:
            raise unusable(self._file, error) from error
        self._said, self._touched = dict(since), now

    def rivals(self) -> dict[str, float]:
        """The devices that other sessions wait for, each with the time since which the first of them does."""
        earliest: dict[str, float] = {}
        try:
            names = os.listdir(self._folder)
        except OSError:
            return earliest
        for name in names:
            if name.endswith(".json") and name != self._file.name:
                for device, since in _read_wish(self._folder / name).items():
                    earliest[device] = min(since, earliest.get(device, since))
        return earliest

    def close(self) -> None:
        """Withdraw what was said. The object can be used again."""
        if self._descriptor is not None:
            self._file.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Close the file and leave it where it is: in a forked process it is another session's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._said = None, {}


def _read_wish(path: Path) -> dict[str, float]:
    try:
        descriptor = open_file(path, os.O_RDONLY)
        try:
            age = abs(time.time() - os.fstat(descriptor).st_mtime)
            if age < _STALE:
                return {device: float(since) for device, since in json.loads(read(descriptor)).items()}
        finally:
            os.close(descriptor)
        if age > _ABANDONED:
            path.unlink()
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    return {}
