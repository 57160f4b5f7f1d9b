"""The locks of devices, which exclude the other sessions of the machine.

For each device the lock folder has a lock file. The session that holds the kernel's lock on the file has the device.
The kernel releases the lock when the session dies. The file's content (:class:`~pytest_accel.leases.holder.Holder`) is
written under the lock and removed before the lock is released. This package never deletes a lock file: if a file is
deleted while a session has it locked, another session can create and lock a second one.

The locks are taken with flock(2), on descriptors most of which stay open from one lease to the next: to open and check
the file each time takes longer than the rest of a lease together.

Importing this module imports psutil: import it only where locks are needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fcntl import flock
from os import close, fstat, ftruncate, kill, lstat, register_at_fork
from pathlib import Path

import psutil

from pytest_accel.leases.holder import Holder, parse_holder
from pytest_accel.leases.request_queue import WaitFile
from pytest_accel.leases.shared_folder import (
    LockFolderError,
    NoLockFileError,
    create_shared,
    default_folder,
    lock_path,
    open_lock_file,
    prepare_folder,
    read,
    unusable,
    write,
)

_HELD_BY_OTHERS = (errno.EWOULDBLOCK, errno.EACCES)
"""The errors of a lock that another process has: flock(2), and fcntl(2), with which NFS emulates flock."""
_MOST_OPEN = 64
"""Number of lock files that stay open when they are not locked: as many as a machine may have devices. A named resource
may have more, and the process needs descriptors for other things."""
_CREATE_TIME_TOLERANCE = 1.5
"""Seconds by which two readings of a process's creation time may differ: psutil adds a count of ticks to the kernel's
boot time, which moves by up to a second when the clock is adjusted."""


class DeviceLocks:
    """The locks that one session has on devices. Not thread-safe: the broker calls it under its own lock.

    A device is locked or not. The broker's leases say for what: a locked device without a lease is one that the session
    keeps for a request that waits for more. A process that is forked from this one inherits no lock: there, the object
    holds nothing.
    """

    def __init__(self, folder: Path | None = None, refuses: Callable[[str], str | None] | None = None) -> None:
        """Create the folder if it is missing; its parent must exist.

        A device is not locked as long as ``refuses(device_id)`` returns a reason. To the broker, it then looks like
        one that another session holds, so the broker tries again.

        Raises :class:`~pytest_accel.leases.shared_folder.LockFolderError` if the folder cannot be created or must not
        be used.
        """
        self.folder = folder or default_folder()
        prepare_folder(self.folder)
        self.wait_file = WaitFile(self.folder)
        self._refuses = refuses
        self._locks: dict[str, _Lock] = {}
        _INSTANCES.add(self)

    @property
    def locked(self) -> list[str]:
        """The devices that this session has locked."""
        return [device_id for device_id, lock in self._locks.items() if lock.holder is not None]

    def holder(self, device_id: str) -> Holder | None:
        """Return the holder of the device in any session, see :func:`who_holds`."""
        mine = self._locks[device_id].holder if device_id in self._locks else None
        return mine or who_holds(self.folder, device_id)

    def acquire(self, device_id: str, holder: Holder) -> bool:
        """Lock the device for `holder`, or take over the lock that this session keeps on it; return success.

        This fails if another session has the lock, if a process of the device's last lease is alive, if something that
        is no lock file has the name of the lock file, or if the device is refused. It never waits. Raises
        :class:`~pytest_accel.leases.shared_folder.LockFolderError` if the files cannot be used.
        """
        if self._refuses is not None and self._refuses(device_id) is not None:
            return False
        if device_id not in self._locks:
            self._locks[device_id] = _Lock(self.folder, device_id)
        return self._locks[device_id].acquire(holder)

    def describe(self, device_id: str, holder: Holder) -> None:
        """Replace the recorded holder of a device; no-op if this session has not locked it, since its lock was lost.

        Raises :class:`~pytest_accel.leases.shared_folder.LockFolderError` if the file cannot be written.
        """
        lock = self._locks.get(device_id)
        if lock is not None and lock.holder is not None:
            lock.describe(holder)

    def reserve(self, device_id: str, waiting: Holder) -> None:
        """Record that the locked device, which no lease has, is kept for `waiting`, the next holder."""
        lock = self._locks[device_id]
        assert lock.holder is not None
        reserved = replace(waiting, processes=lock.holder.processes)
        if reserved != lock.holder:
            with suppress(LockFolderError):  # The content only informs users; the lock itself decides.
                lock.describe(reserved)

    def unlock(self, device_id: str) -> None:
        """Unlock a device, for all sessions.

        The content of the lock file stays if a process of the last lease is still alive: the device cannot be locked
        before that process has ended.
        """
        self._locks[device_id].unlock()
        if len(self._locks) > _MOST_OPEN:
            self._locks.pop(device_id).close()

    def renew_missing(self) -> dict[str, str]:
        """Create and lock new lock files in place of those that were deleted, moved or replaced.

        Return the devices for which that fails, with the reason. The session has not locked them any more.
        """
        lost: dict[str, str] = {}
        for device_id in self.locked:
            lock = self._locks[device_id]
            try:
                if not lock.is_in_place():
                    lock.renew()
            except LockFolderError as error:
                lost[device_id] = f"the lock of {device_id} was lost, since its lock file was deleted or moved: {error}"
        return lost

    def close(self) -> None:
        """Unlock all devices and delete the wait file. The object can be used again."""
        self.wait_file.close()
        for device_id in self.locked:
            self.unlock(device_id)
        self._forget()

    def _forget(self) -> None:
        while self._locks:
            self._locks.popitem()[1].close()
        self.wait_file.forget()


class _Lock:
    """The lock of one device in one session. Only this class changes its state.

    A device whose last lease has a living process cannot be acquired: so no process sees a device that another lease
    has, even if a session dies before its ranks.
    """

    def __init__(self, folder: Path, device_id: str) -> None:
        self.holder: Holder | None = None
        """The holder in the lock file; None if this session does not have the lock."""
        self._folder = folder
        self._device_id = device_id
        self._path = lock_path(folder, device_id)
        self._descriptor: int | None = None
        """The open lock file; stays open in an unlocked lock."""

    def acquire(self, holder: Holder) -> bool:
        try:
            descriptor = self._lock()
            if descriptor is None:
                self.holder = None
                return False
            try:
                last = parse_holder(read(descriptor))
                acquired = last is None or not is_in_use(last)
                if acquired:
                    write(descriptor, holder.as_json())
            except BaseException:
                self.holder = None
                flock(descriptor, fcntl.LOCK_UN)
                raise
            if acquired:
                self.holder = holder
            elif self.holder is None:
                flock(descriptor, fcntl.LOCK_UN)
        except OSError as error:
            raise unusable(self._path, error) from error
        return acquired

    def describe(self, holder: Holder) -> None:
        self.holder = holder
        try:
            write(self._locked(), holder.as_json())
        except OSError as error:
            raise unusable(self._path, error) from error

    def unlock(self) -> None:
        assert self.holder is not None
        last, self.holder = self.holder, None
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
        """Create and lock a new lock file for a locked device whose file is not in its place.

        Raises :class:`~pytest_accel.leases.shared_folder.LockFolderError` if that fails; the lock is then unlocked.
        """
        holder = self.holder
        assert holder is not None
        self.close()
        try:
            descriptor = self._lock()
            if descriptor is None:
                other = who_holds(self._folder, self._device_id)
                by = "another session" if other is None else str(other)
                raise OSError(errno.EBUSY, f"it was replaced, and the new one is held by {by}")
            write(descriptor, holder.as_json())
        except OSError as error:
            self.close()
            raise unusable(self._path, error) from error
        self.holder = holder

    def close(self) -> None:
        """Close the lock file, which unlocks the device unless a fork of this process has the file open, too."""
        self.holder = None
        if self._descriptor is not None:
            close(self._descriptor)
            self._descriptor = None

    def _locked(self) -> int:
        assert self._descriptor is not None
        return self._descriptor

    def _lock(self) -> int | None:
        """Take the kernel's lock; return the locked descriptor, or None if that is impossible for now.

        Another session has the lock, or something else has its name.
        """
        for _ in range(2):
            if self._descriptor is None:
                if not os.path.lexists(self._path):
                    prepare_folder(self._folder)
                    create_shared(self._path)
                try:
                    self._descriptor = open_lock_file(self._path)
                except NoLockFileError:
                    return None
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

    A holder that has not written the lock file yet, or has written something invalid, is returned with pid 0, and so is
    what has the name of the lock file and is none. No file is written, and `folder` need not exist.
    """
    path = lock_path(folder, device_id)
    try:
        descriptor = open_lock_file(path, os.O_RDONLY)
        try:
            # A shared lock, so that two concurrent calls do not take each other for the holder.
            flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            last = parse_holder(read(descriptor))
            # The device cannot be acquired before these processes have ended.
            return last if last is not None and is_in_use(last) else None
        except BlockingIOError:
            return parse_holder(read(descriptor)) or Holder.unknown()
        finally:
            close(descriptor)
    except FileNotFoundError:
        return None
    except NoLockFileError as error:
        return Holder.unknown(error.about)
    except OSError as error:
        raise unusable(path, error) from error


def is_in_use(last: Holder) -> bool:
    """Return True if a process of this holder of a device is alive."""
    return any(_is_alive(*process) for process in last.processes)


def is_outer(holder: Holder) -> bool:
    """Return True if this process is one of the holder's processes, or was started from one of them."""
    with suppress(psutil.Error):
        this = psutil.Process()
        pids = {process.pid for process in (this, *this.parents())}
        return any(pid in pids and _is_alive(pid, created) for pid, created in holder.processes)
    return False


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


_INSTANCES: weakref.WeakSet[DeviceLocks] = weakref.WeakSet()


def _forget_all() -> None:
    # A forked process shares the open files, and so the locks: it would keep them when the session has ended.
    for locks in tuple(_INSTANCES):
        locks._forget()


register_at_fork(after_in_child=_forget_all)
