"""The wait queue between sessions: files in the lock folder that say which devices each session waits for.

Each waiting session has one file with the devices that it would take, each with the time since when it waits for it.
The session rewrites its file regularly; the others ignore a file that has not been modified for five seconds.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from json import loads
from os import close, fchmod, fstat, getpid, listdir, stat
from os import open as open_descriptor
from pathlib import Path
from time import time, time_ns

from pytest_accel.core.clock import monotonic
from pytest_accel.leases.lock_dir import PREFIX, unusable
from pytest_accel.leases.shared_files import open_file, read, write

_REFRESH_INTERVAL = 0.5
"""Seconds after which a session rewrites its unchanged file, so that it does not become stale."""
_STALE_AFTER = 5.0
"""Seconds after which the file of another session is ignored: its process was killed or stopped, not only delayed."""
_DELETE_AFTER = 60.0
"""Seconds after which the file of another session is deleted: its session must have been killed."""
_LONGEST_WAIT = 30 * 24 * 3600.0
"""Seconds, 30 days: a time further in the past or in the future is invalid, and is ignored."""
_MTIME_RESOLUTION = 50_000_000
"""Nanoseconds after a folder's modification time from which the next change is certain to have a different time. File
systems take the time from a clock that ticks about 100 times a second or more often."""
_SUFFIX = ".wish"


class WaitQueue:
    """The wait file of one session, and a reader of the other sessions' files. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the lock folder, which the caller has prepared and checked."""
        self._folder = folder
        self._file = folder / f"{PREFIX}{getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._descriptor: int | None = None
        self._published: dict[str, float] = {}
        self._touched = 0.0
        self._other_paths: tuple[Path, ...] = ()
        self._listed_at = -1
        """The folder's modification time when `_other_paths` was listed; -1 if it must be listed again."""

    def publish(self, since: Mapping[str, float]) -> None:
        """Tell the other sessions which devices this one waits for, and since when (seconds since the epoch).

        The mapping replaces the previous one; an empty mapping ends the wait. Call this at least once a second while
        the session waits. Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` if the file cannot be written.
        """
        now = monotonic()
        if since == self._published and (not since or now - self._touched < _REFRESH_INTERVAL):
            return
        try:
            if self._descriptor is not None and not fstat(self._descriptor).st_nlink:
                close(self._descriptor)
                self._descriptor = None
            if self._descriptor is None:
                access = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = open_descriptor(self._file, access, 0o644)
                fchmod(self._descriptor, 0o644)
            write(self._descriptor, dict(since))
        except OSError as error:
            raise unusable(self._file, error) from error
        self._published, self._touched = dict(since), now

    def others(self) -> dict[str, float]:
        """Return the devices that other sessions wait for, each with the earliest time since when one waits for it."""
        earliest: dict[str, float] = {}
        for path in self._other_files():
            for device, since in _read_waits(path).items():
                earliest[device] = min(since, earliest.get(device, since))
        return earliest

    def _other_files(self) -> tuple[Path, ...]:
        # Cached: listing a temporary directory with thousands of files takes milliseconds, and this is called often.
        try:
            changed = stat(self._folder).st_mtime_ns
            if changed != self._listed_at:
                self._other_paths = tuple(path for path in wait_files(self._folder) if path != self._file)
                self._listed_at = changed if time_ns() - changed > _MTIME_RESOLUTION else -1
        except OSError:
            self._other_paths, self._listed_at = (), -1
        return self._other_paths

    def close(self) -> None:
        """Delete this session's file. The object can be used again."""
        if self._descriptor is not None:
            self._file.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Close the file without deleting it: in a forked process the file belongs to the parent's session."""
        if self._descriptor is not None:
            close(self._descriptor)
        self._descriptor, self._published = None, {}


def wait_files(folder: Path) -> list[Path]:
    """Return the wait files of all sessions in `folder`. Raises OSError."""
    names = listdir(folder)
    return [folder / name for name in names if name.startswith(PREFIX) and name.endswith(_SUFFIX)]


def parse_waits(data: bytes, now: float) -> dict[str, float]:
    """Return the devices in the content of a wait file, each with the time since when the session waits for it.

    Any user may have written anything to the file, so invalid content is ignored. A time that is not finite or more
    than 30 days from `now` (seconds since the epoch) is left out: it would put the session before or behind all others
    forever.
    """
    try:
        content = loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {
        device: float(since)
        for device, since in content.items()
        # Compare before converting: an integer may be too large for a float.
        if isinstance(since, (int, float)) and now - _LONGEST_WAIT <= since <= now + _LONGEST_WAIT
    }


def _read_waits(path: Path) -> dict[str, float]:
    with suppress(OSError):
        descriptor = open_file(path, os.O_RDONLY)
        try:
            now = time()
            age = abs(now - fstat(descriptor).st_mtime)
            if age < _STALE_AFTER:
                return parse_waits(read(descriptor), now)
        finally:
            close(descriptor)
        if age > _DELETE_AFTER:
            path.unlink()
    return {}
