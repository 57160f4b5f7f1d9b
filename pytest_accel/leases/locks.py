"""Device locks: one lock for each device, shared by all sessions and users of the machine.

For each device the lock folder has a lock file. The session that holds the kernel's lock on the file has the device.
The kernel releases the lock when the session dies. The file's content (:class:`Holder`) is written under the lock and
removed before the lock is released. This package never deletes a lock file: if a file is deleted while a session has
it locked, another session can create and lock a second one. If another program deletes the file, its holder notices
that (:meth:`DeviceLocks.missing`) and creates a new one.

The locks are filelock's native ones, taken on descriptors that stay open from one lease to the next: filelock's own
locks open, resolve and close the file each time, which takes longer than the rest of a lease together.

Importing this module imports filelock and psutil: import it only where locks are needed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import filelock
import psutil

from pytest_accel.leases.lock_dir import (
    LockFolderError,
    create_shared,
    default_folder,
    lock_path,
    open_file,
    prepare_folder,
    printable,
    read,
    unusable,
    user_name,
    write,
)
from pytest_accel.leases.wait_queue import WaitQueue

_CREATE_TIME_TOLERANCE = 1.5
"""Seconds by which two readings of a process's creation time may differ: psutil adds a count of ticks to the kernel's
boot time, which moves by up to a second when the clock is adjusted."""
_LARGEST_PID = 2**31 - 1
"""The largest number that pid_t holds."""
_LAST_MOMENT = 1e11
"""Seconds since the epoch (the year 5138): a later time is invalid, and too large for some functions."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a device, as it describes itself in the lock file."""

    pid: int
    """The session's main process."""
    user: str
    test: str
    """Node id of the test that runs on the device, or another reason why the device is held."""
    since: float
    """Seconds since the epoch."""
    processes: tuple[tuple[int, float], ...] = ()
    """Pid and creation time (``psutil.Process.create_time``) of every process that uses the device."""

    @classmethod
    def here(cls, test: str) -> Holder:
        """Return a holder for this process, from now on, with no process on the device yet."""
        return cls(os.getpid(), user_name(os.getuid()), test, time.time())

    def as_json(self) -> dict[str, object]:
        """Return the content of the lock file."""
        return {name: getattr(self, name) for name in self.__slots__}


class DeviceLocks:
    """The device locks of one session. Not thread-safe: the broker calls it under its own lock.

    A device is held (by a lease of this session), retained (released, but still locked, so that only this session can
    take it) or unlocked. A process that is forked from this one inherits no lock: there, the object holds nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Create the folder if it is missing; its parent must exist.

        Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` if the folder cannot be created or must not be
        used.
        """
        self.folder = folder or default_folder()
        prepare_folder(self.folder)
        self.wait_queue = WaitQueue(self.folder)
        self._descriptors: dict[str, int] = {}
        self._held: dict[str, Holder] = {}
        self._retained: dict[str, Holder] = {}
        """The last holders of the retained devices."""
        _INSTANCES.add(self)

    def try_acquire(self, device_id: str, holder: Holder) -> bool:
        """Lock the device for `holder` if it is free and no process of its last lease is alive; return success.

        This never waits. Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` if the files cannot be used.
        """
        if device_id in self._held:
            return False
        try:
            descriptor = self._lock(device_id)
            if descriptor is None:
                self._retained.pop(device_id, None)
                return False
            try:
                last = parse_holder(read(descriptor))
                taken = last is None or not any(is_alive(*process) for process in last.processes)
                if taken:
                    write(descriptor, holder.as_json())
            except BaseException:
                self._retained.pop(device_id, None)
                filelock.unlock_descriptor(descriptor)
                raise
            if taken:
                self._retained.pop(device_id, None)
                self._held[device_id] = holder
            elif device_id not in self._retained:
                filelock.unlock_descriptor(descriptor)
        except OSError as error:
            raise unusable(self._path(device_id), error) from error
        return taken

    def update(self, device_id: str, holder: Holder) -> None:
        """Replace the recorded holder of a device that this session holds.

        Raises KeyError if the session does not hold the device,
        :class:`~pytest_accel.leases.lock_dir.LockFolderError` if the file cannot be written.
        """
        if device_id not in self._held:
            raise KeyError(f"{device_id} is not held by this session, which holds {sorted(self._held)}")
        self._held[device_id] = holder
        try:
            write(self._descriptors[device_id], holder.as_json())
        except OSError as error:
            raise unusable(self._path(device_id), error) from error

    def release(self, device_id: str) -> None:
        """Release and unlock a device that this session holds. Raises KeyError if it does not hold the device.

        The content of the lock file stays if a process of the lease is still alive: the device cannot be acquired
        before that process has ended.
        """
        self.retain(device_id)
        self.unlock()

    def retain(self, device_id: str) -> None:
        """Release a device but keep it locked: until :meth:`unlock`, only this session can acquire it."""
        self._retained[device_id] = self._held.pop(device_id)

    def holds(self, device_id: str) -> bool:
        """Return True if a lease of this session holds the device."""
        return device_id in self._held

    @property
    def retained(self) -> frozenset[str]:
        """The devices that were released and are still locked."""
        return frozenset(self._retained)

    def reserve(self, device_id: str, waiting: Holder) -> None:
        """Record in the lock file that a retained device is reserved for `waiting`, the next holder."""
        last = self._retained[device_id]
        kept = replace(waiting, processes=last.processes)
        if kept != last:
            self._retained[device_id] = kept
            with suppress(OSError):  # The content only informs users; the lock itself decides.
                write(self._descriptors[device_id], kept.as_json())

    def unlock(self, devices: Iterable[str] | None = None) -> None:
        """Unlock those of `devices` that are retained; None: all retained devices."""
        for device_id in tuple(self._retained if devices is None else devices):
            if device_id in self._retained:
                self._unlock_one(device_id, self._retained.pop(device_id))

    def missing(self) -> list[str]:
        """Return the held and retained devices whose lock file was deleted, moved or replaced.

        Another session could create a new lock file in its place, and take the device.
        """
        return [device_id for device_id in (*self._held, *self._retained) if not self._is_in_place(device_id)]

    def _is_in_place(self, device_id: str) -> bool:
        mine = os.fstat(self._descriptors[device_id])
        try:
            found = os.lstat(self._path(device_id))
        except OSError:
            return False
        return os.path.samestat(mine, found)

    def renew(self, device_id: str) -> None:
        """Create and lock a new lock file for a device whose file is :meth:`missing`.

        Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` if that fails; the session then does not hold the
        device any more.
        """
        holder, retained = self._held.get(device_id), device_id in self._retained
        last = holder or self._retained[device_id]
        os.close(self._descriptors.pop(device_id))
        try:
            descriptor = self._lock(device_id)
            if descriptor is None:
                other = who_holds(self.folder, device_id)
                by = f"pid {other.pid} ({other.user}) for {other.test}" if other is not None else "another session"
                raise OSError(errno.EBUSY, f"it was replaced, and the new one is locked by {by}")
            write(descriptor, last.as_json())
        except (OSError, LockFolderError) as error:
            (self._retained if retained else self._held).pop(device_id)
            raise error if isinstance(error, LockFolderError) else unusable(self._path(device_id), error) from error

    def _unlock_one(self, device_id: str, last: Holder) -> None:
        descriptor = self._descriptors[device_id]
        try:
            with suppress(OSError):  # If this cannot be found out, the next session checks the processes again.
                if not any(is_alive(*process) for process in last.processes):
                    os.ftruncate(descriptor, 0)
        finally:
            filelock.unlock_descriptor(descriptor)

    def holder(self, device_id: str) -> Holder | None:
        """Return the current holder of the device, or the last one if its processes are still alive, else None.

        A holder that has not written the lock file yet, or has written something invalid, is returned with pid 0.
        """
        return self._held.get(device_id) or who_holds(self.folder, device_id)

    def close(self) -> None:
        """Unlock all devices and delete the wait file. The object can be used again."""
        self.wait_queue.close()
        for device_id in tuple(self._held):
            self.release(device_id)
        self._forget()

    def _lock(self, device_id: str) -> int | None:
        for _ in range(2):
            descriptor = self._descriptors.get(device_id)
            if descriptor is None:
                path = self._path(device_id)
                if not os.path.lexists(path):
                    prepare_folder(self.folder)
                    create_shared(path)
                descriptor = self._descriptors[device_id] = open_file(path)
            if not filelock.lock_descriptor(descriptor, blocking=False):
                return None
            if self._is_in_place(device_id):
                return descriptor
            # A cleaner of temporary files has deleted this file, and another session may lock a new one: try again.
            os.close(self._descriptors.pop(device_id))
        return None

    def _forget(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        self._held.clear()
        self._retained.clear()
        self.wait_queue.forget()

    def _path(self, device_id: str) -> Path:
        return lock_path(self.folder, device_id)


def who_holds(folder: Path, device_id: str) -> Holder | None:
    """Return the holder of a device like :meth:`DeviceLocks.holder`, without writing; `folder` need not exist."""
    path = lock_path(folder, device_id)
    try:
        descriptor = open_file(path, os.O_RDONLY)
        try:
            # A shared lock, so that two concurrent calls do not take each other for the holder.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            last = parse_holder(read(descriptor))
            # The device cannot be acquired before these processes have ended.
            return last if last is not None and any(is_alive(*process) for process in last.processes) else None
        except BlockingIOError:
            return parse_holder(read(descriptor)) or Holder(0, "unknown", "unknown", 0.0)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(path, error) from error


def is_alive(pid: int, created: float) -> bool:
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
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    if sys.platform == "linux" and not os.path.exists("/proc/self/stat"):
        raise OSError(errno.ENOENT, f"/proc cannot be read: it is not known whether process {pid} still runs", "/proc")
    return True


def parse_holder(data: bytes) -> Holder | None:
    """Return the holder in the content of a lock file, or None if the content is invalid.

    Any user may have written anything to the file, so numbers are checked and texts are made printable.
    """
    try:
        content = json.loads(data)
        match content:
            case {
                "pid": int(pid),
                "user": str(user),
                "test": str(test),
                "since": int() | float() as since,
                "processes": list(processes),
            } if 0 < pid <= _LARGEST_PID and 0 <= since <= _LAST_MOMENT:
                named = tuple(
                    (number, float(created))
                    for number, created in processes
                    if isinstance(number, int) and 0 < number <= _LARGEST_PID
                    if isinstance(created, (int, float)) and 0 <= created <= _LAST_MOMENT
                )
                return Holder(pid, printable(user), printable(test), float(since), named)
    except (ValueError, TypeError, RecursionError):
        pass
    return None


_INSTANCES: weakref.WeakSet[DeviceLocks] = weakref.WeakSet()


def _forget_all() -> None:
    # A forked process shares the open files and thereby the locks: a lock kept there would outlive its session.
    for locks in tuple(_INSTANCES):
        locks._forget()


os.register_at_fork(after_in_child=_forget_all)
