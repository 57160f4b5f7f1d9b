"""The lock of one device, which all sessions and users of the machine share.

For each device the lock folder has a lock file. The session that holds the kernel's lock on the file has the device.
The kernel releases the lock when the session dies. The file's content (:class:`~pytest_accel.leases.holder.Holder`) is
written under the lock and removed before the lock is released. This package never deletes a lock file: if a file is
deleted while a session has it locked, another session can create and lock a second one.

The locks are taken with flock(2), on descriptors that stay open from one lease to the next: to open and check the file
each time takes longer than the rest of a lease together.

Importing this module imports psutil: import it only where locks are needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from fcntl import flock
from os import close, fstat, ftruncate, kill, lstat
from pathlib import Path

import psutil

from pytest_accel.leases.holder import Holder, parse_holder
from pytest_accel.leases.lock_dir import lock_path, prepare_folder, unusable
from pytest_accel.leases.shared_files import create_shared, open_file, read, write

_HELD_BY_OTHERS = (errno.EWOULDBLOCK, errno.EACCES)
"""The errors of a lock that another process has: flock(2), and fcntl(2), with which NFS emulates flock."""
_CREATE_TIME_TOLERANCE = 1.5
"""Seconds by which two readings of a process's creation time may differ: psutil adds a count of ticks to the kernel's
boot time, which moves by up to a second when the clock is adjusted."""


class LockState(Enum):
    """The state of a device lock in this session."""

    UNLOCKED = "unlocked"
    HELD = "held by a lease"
    RETAINED = "released, but still locked, so that only this session can take the device"


class DeviceLock:
    """The lock of one device in one session. Only this class changes its state. Not thread-safe.

    :meth:`acquire` makes an unlocked or retained lock a held one, :meth:`retain` a held one a retained one, and
    :meth:`unlock` a retained one an unlocked one. A device whose last lease has a living process cannot be acquired: so
    no process sees a device that another lease has, even if a session dies before its ranks.
    """

    def __init__(self, folder: Path, device_id: str) -> None:
        self.state = LockState.UNLOCKED
        self._folder = folder
        self._device_id = device_id
        self._path = lock_path(folder, device_id)
        self._descriptor: int | None = None
        """The open lock file; stays open in an unlocked lock."""
        self._holder: Holder | None = None
        """The current holder if the lock is held, the last or next one if it is retained, else None."""

    @property
    def holder(self) -> Holder | None:
        """The current holder if a lease of this session holds the device."""
        return self._holder if self.state is LockState.HELD else None

    def acquire(self, holder: Holder) -> bool:
        """Lock the device for `holder` if it is free and no process of its last lease is alive; return success.

        This never waits. Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` if the files cannot be used.
        """
        if self.state is LockState.HELD:
            return False
        try:
            descriptor = self._lock()
            if descriptor is None:
                self._set(LockState.UNLOCKED, None)
                return False
            try:
                last = parse_holder(read(descriptor))
                acquired = last is None or not is_in_use(last)
                if acquired:
                    write(descriptor, holder.as_json())
            except BaseException:
                self._set(LockState.UNLOCKED, None)
                flock(descriptor, fcntl.LOCK_UN)
                raise
            if acquired:
                self._set(LockState.HELD, holder)
            elif self.state is LockState.UNLOCKED:
                flock(descriptor, fcntl.LOCK_UN)
        except OSError as error:
            raise unusable(self._path, error) from error
        return acquired

    def update(self, holder: Holder) -> None:
        """Replace the recorded holder of a held device.

        Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` if the file cannot be written.
        """
        self._set(LockState.HELD, holder)
        try:
            write(self._locked(), holder.as_json())
        except OSError as error:
            raise unusable(self._path, error) from error

    def retain(self) -> None:
        """Release a held device but keep it locked."""
        self._set(LockState.RETAINED, self._holder)

    def reserve(self, waiting: Holder) -> None:
        """Record in the lock file that a retained device is reserved for `waiting`, the next holder."""
        assert self._holder is not None
        reserved = replace(waiting, processes=self._holder.processes)
        if reserved != self._holder:
            self._set(LockState.RETAINED, reserved)
            with suppress(OSError):  # The content only informs users; the lock itself decides.
                write(self._locked(), reserved.as_json())

    def unlock(self) -> None:
        """Unlock a retained device.

        The content of the lock file stays if a process of the last lease is still alive: the device cannot be acquired
        before that process has ended.
        """
        assert self._holder is not None
        last = self._holder
        self._set(LockState.UNLOCKED, None)
        try:
            with suppress(OSError):  # If the check fails, the content stays, and the next session repeats the check.
                if not is_in_use(last):
                    ftruncate(self._locked(), 0)
        finally:
            flock(self._locked(), fcntl.LOCK_UN)

    def is_in_place(self) -> bool:
        """Return False if the open lock file was deleted, moved or replaced.

        Another session could create a new lock file in its place, and take the device.
        """
        mine = fstat(self._locked())
        try:
            found = lstat(self._path)
        except OSError:
            return False
        return os.path.samestat(mine, found)

    def renew(self) -> None:
        """Create and lock a new lock file for a held or retained device whose file is not in its place.

        Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` if that fails; the lock is then unlocked.
        """
        assert self._holder is not None
        state, holder = self.state, self._holder
        self.close()
        try:
            descriptor = self._lock()
            if descriptor is None:
                other = who_holds(self._folder, self._device_id)
                by = "another session" if other is None else str(other)
                raise OSError(errno.EBUSY, f"it was replaced, and the new one is locked by {by}")
            write(descriptor, holder.as_json())
        except OSError as error:
            self.close()
            raise unusable(self._path, error) from error
        self._set(state, holder)

    def close(self) -> None:
        """Close the lock file, which unlocks the device unless a fork of this process has the file open, too."""
        self._set(LockState.UNLOCKED, None)
        if self._descriptor is not None:
            close(self._descriptor)
            self._descriptor = None

    def _set(self, state: LockState, holder: Holder | None) -> None:
        self.state, self._holder = state, holder

    def _locked(self) -> int:
        assert self._descriptor is not None
        return self._descriptor

    def _lock(self) -> int | None:
        """Take the kernel's lock; return the locked descriptor, or None if another session has the lock."""
        for _ in range(2):
            if self._descriptor is None:
                if not os.path.lexists(self._path):
                    prepare_folder(self._folder)
                    create_shared(self._path)
                self._descriptor = open_file(self._path)
            try:
                flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _HELD_BY_OTHERS:
                    return None
                raise
            if self.is_in_place():
                return self._descriptor
            # A cleaner of temporary files has deleted this file, and another session may lock a new one: try again.
            self.close()
        return None


def who_holds(folder: Path, device_id: str) -> Holder | None:
    """Return the current holder of a device, or the last one if its processes are still alive, else None.

    A holder that has not written the lock file yet, or has written something invalid, is returned with pid 0. No
    file is written, and `folder` need not exist.
    """
    path = lock_path(folder, device_id)
    try:
        descriptor = open_file(path, os.O_RDONLY)
        try:
            # A shared lock, so that two concurrent calls do not take each other for the holder.
            flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            last = parse_holder(read(descriptor))
            # The device cannot be acquired before these processes have ended.
            return last if last is not None and is_in_use(last) else None
        except BlockingIOError:
            return parse_holder(read(descriptor)) or Holder(0, "unknown", "unknown", 0.0)
        finally:
            close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(path, error) from error


def is_in_use(last: Holder) -> bool:
    """Return True if a process of this holder of a device is alive."""
    return any(_is_alive(*process) for process in last.processes)


def _is_alive(pid: int, created: float) -> bool:
    """Return True if the process `pid` that was created at `created` (``psutil.Process.create_time``) still runs.

    A zombie does not count as running: the kernel has released its devices. Raises OSError if this cannot be found out,
    for example because this process may not open more files.
    """
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < _CREATE_TIME_TOLERANCE
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return _exists(pid)


def _exists(pid: int) -> bool:
    """Return True if a process `pid` exists, even if ``/proc`` hides it (proc(5): hidepid).

    Raises OSError if ``/proc`` cannot be read at all.
    """
    try:
        kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    if sys.platform == "linux" and not os.path.exists("/proc/self/stat"):
        raise OSError(errno.ENOENT, f"/proc cannot be read: it is not known whether process {pid} still runs", "/proc")
    return True
