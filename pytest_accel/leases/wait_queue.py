"""What sessions wait for, made known to one another in the lock folder.

The lock folder holds a file for each session that waits: which devices it would take, and since when. A session keeps
its own file fresh; one that has not been touched for two seconds counts for nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pytest_accel.core.clock import monotonic
from pytest_accel.leases.lock_dir import PREFIX, open_file, read, unusable, write

_REFRESH = 0.5
_STALE = 2.0
_ABANDONED = 60.0
_LONGEST_WAIT = 30 * 24 * 3600.0
"""Seconds, 30 days: a wish that counts from earlier, or from as far in the future, is no session's."""
_SETTLED = 50_000_000
"""Nanoseconds since a folder changed after which its time of change is sure to differ at the next change: file systems
take it from a clock that ticks up to 100 times a second."""
_SUFFIX = ".wish"


class Wishes:
    """What one session waits for, and what the others do. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the lock folder, which must be fit for use."""
        self._folder = folder
        self._file = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._descriptor: int | None = None
        self._said: dict[str, float] = {}
        self._touched = 0.0
        self._others: tuple[Path, ...] = ()
        self._listed = -1
        """The folder's time of change when `_others` was listed; -1 if they must be listed again."""

    def want(self, since: Mapping[str, float]) -> None:
        """Tell the other sessions which devices this one waits for, and since when (seconds since the epoch).

        Replaces what was said before; an empty mapping withdraws it. Call it at least every second while it holds.
        Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` where it cannot be written.
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
        """Return the devices that other sessions wait for, each with the time since which the first of them does."""
        earliest: dict[str, float] = {}
        for path in self._files_of_others():
            for device, since in _read_wish(path).items():
                earliest[device] = min(since, earliest.get(device, since))
        return earliest

    def _files_of_others(self) -> tuple[Path, ...]:
        # Listing a temporary directory with thousands of files takes milliseconds, and happens often.
        try:
            changed = os.stat(self._folder).st_mtime_ns
            if changed != self._listed:
                self._others = tuple(path for path in wish_files(self._folder) if path != self._file)
                self._listed = changed if time.time_ns() - changed > _SETTLED else -1
        except OSError:
            self._others, self._listed = (), -1
        return self._others

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


def wish_files(folder: Path) -> list[Path]:
    """Return the files in which sessions say what they wait for. Raises OSError."""
    names = os.listdir(folder)
    return [folder / name for name in names if name.startswith(PREFIX) and name.endswith(_SUFFIX)]


def parse_wish(data: bytes, now: float) -> dict[str, float]:
    """Return the devices that a wish file names and since when each is waited for; nothing that makes no sense.

    Any user may have written anything there. A time that is not finite or not near `now` (seconds since the epoch) is
    left out: it would put the session before or behind all others for ever.
    """
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(told, dict):
        return {}
    return {
        device: float(since)
        for device, since in told.items()
        # Compared before it is converted: an integer may be too large for a float.
        if isinstance(since, (int, float)) and now - _LONGEST_WAIT <= since <= now + _LONGEST_WAIT
    }


def _read_wish(path: Path) -> dict[str, float]:
    with suppress(OSError):
        descriptor = open_file(path, os.O_RDONLY)
        try:
            now = time.time()
            age = abs(now - os.fstat(descriptor).st_mtime)
            if age < _STALE:
                return parse_wish(read(descriptor), now)
        finally:
            os.close(descriptor)
        if age > _ABANDONED:
            path.unlink()
    return {}
