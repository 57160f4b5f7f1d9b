"""One lock a device for all sessions and all users of the machine.

For each device the lock folder holds a lock file: whoever has the kernel's lock on it has the device. The kernel drops
it when the holder dies. What the file says (:class:`Holder`) is written under the lock and emptied before the lock is
dropped. This package never deletes the file: one that is deleted while somebody has it open makes room for a second
lock. Where something else deletes it, the holder finds that out (:meth:`DeviceLocks.missing`) and makes a new one.

The locks are filelock's native ones, taken on descriptors that stay open from one lease to the next: a path lock of
filelock opens, resolves and closes its file each time, which costs more than all the rest of a lease.

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
from pytest_accel.leases.wait_queue import Wishes

# psutil adds the kernel's boot time, which moves by up to a second when the clock is adjusted, to a count of ticks.
_CREATE_TIME_TOLERANCE = 1.5
_LARGEST_PID = 2**31 - 1
"""The largest number that pid_t holds."""
_LAST_MOMENT = 1e11
"""Seconds since the epoch (the year 5138): a later time is no time, and is more than some functions take."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a device, in its own words."""

    pid: int
    """The session's main process."""
    user: str
    test: str
    """Node id of the test that runs on the device, or what else it is kept for."""
    since: float
    """Seconds since the epoch."""
    processes: tuple[tuple[int, float], ...] = ()
    """Pid and creation time (``psutil.Process.create_time``) of every process that uses the device."""

    @classmethod
    def here(cls, test: str) -> Holder:
        """This process, from now on, with no process on the device yet."""
        return cls(os.getpid(), user_name(os.getuid()), test, time.time())

    def as_json(self) -> dict[str, object]:
        """What the lock file says."""
        return {name: getattr(self, name) for name in self.__slots__}


class DeviceLocks:
    """The locks of one session. Not thread-safe: the broker calls it under its own lock.

    A process that is forked from this one inherits no lock: there, the object holds nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Create the folder where it is missing; its parent must exist.

        Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` where the folder cannot be created or written, or
        is no real directory.
        """
        self.folder = folder or default_folder()
        prepare_folder(self.folder)
        self.wishes = Wishes(self.folder)
        self._descriptors: dict[str, int] = {}
        self._held: dict[str, Holder] = {}
        self._loose: dict[str, Holder] = {}
        """The last holders of devices that are still locked, and free for the next request of this session."""
        _INSTANCES.add(self)

    def try_acquire(self, device_id: str, holder: Holder) -> bool:
        """Take the device if nobody has it and no process of its last lease is alive, and say that `holder` has it.

        Never waits. Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` where the files cannot be used.
        """
        if device_id in self._held:
            return False
        try:
            descriptor = self._lock(device_id)
            if descriptor is None:
                self._loose.pop(device_id, None)
                return False
            try:
                last = parse_holder(read(descriptor))
                taken = last is None or not any(is_alive(*process) for process in last.processes)
                if taken:
                    write(descriptor, holder.as_json())
            except BaseException:
                self._loose.pop(device_id, None)
                filelock.unlock_descriptor(descriptor)
                raise
            if taken:
                self._loose.pop(device_id, None)
                self._held[device_id] = holder
            elif device_id not in self._loose:
                filelock.unlock_descriptor(descriptor)
        except OSError as error:
            raise unusable(self._path(device_id), error) from error
        return taken

    def update(self, device_id: str, holder: Holder) -> None:
        """Say something else about a device that this session holds.

        Raises KeyError for one that it does not hold, :class:`~pytest_accel.leases.lock_dir.LockFolderError` where it
        cannot be written.
        """
        if device_id not in self._held:
            raise KeyError(f"{device_id} is not held by this session, which holds {sorted(self._held)}")
        self._held[device_id] = holder
        try:
            write(self._descriptors[device_id], holder.as_json())
        except OSError as error:
            raise unusable(self._path(device_id), error) from error

    def release(self, device_id: str) -> None:
        """Let go of a device that this session holds; KeyError for one that it does not hold.

        What was said of it stays while a process of the lease is alive, so that the next one waits for its end.
        """
        self.loosen(device_id)
        self.let_go()

    def loosen(self, device_id: str) -> None:
        """As :meth:`release`, but until :meth:`let_go` only this session can take the device."""
        self._loose[device_id] = self._held.pop(device_id)

    def holds(self, device_id: str) -> bool:
        """Return whether somebody in this session has the device."""
        return device_id in self._held

    @property
    def loose(self) -> frozenset[str]:
        """The devices that nobody in this session has any more and that are locked still."""
        return frozenset(self._loose)

    def keep(self, device_id: str, waiting: Holder) -> None:
        """Say that a device that is loose is kept for `waiting`, a holder to come."""
        last = self._loose[device_id]
        kept = replace(waiting, processes=last.processes)
        if kept != last:
            self._loose[device_id] = kept
            with suppress(OSError):  # The text is for people: the lock decides.
                write(self._descriptors[device_id], kept.as_json())

    def let_go(self, devices: Iterable[str] | None = None) -> None:
        """Let go of those of `devices` that are loose; None: of every device that is."""
        for device_id in tuple(self._loose if devices is None else devices):
            if device_id in self._loose:
                self._unlock(device_id, self._loose.pop(device_id))

    def missing(self) -> list[str]:
        """Return the devices that are held, or loose, and whose lock file is not in its place any more.

        Another session would make a new lock file there, and take the device.
        """
        return [device_id for device_id in (*self._held, *self._loose) if not self._is_in_place(device_id)]

    def _is_in_place(self, device_id: str) -> bool:
        mine = os.fstat(self._descriptors[device_id])
        try:
            found = os.lstat(self._path(device_id))
        except OSError:
            return False
        return os.path.samestat(mine, found)

    def renew(self, device_id: str) -> None:
        """Make and lock a new lock file of a device whose own is :meth:`missing`.

        Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` where that fails, in which case the session does
        not hold the device any more.
        """
        holder, loose = self._held.get(device_id), device_id in self._loose
        last = holder or self._loose[device_id]
        os.close(self._descriptors.pop(device_id))
        try:
            descriptor = self._lock(device_id)
            if descriptor is None:
                there = who_holds(self.folder, device_id)
                by = f"pid {there.pid} ({there.user}) for {there.test}" if there is not None else "another session"
                raise OSError(errno.EBUSY, f"it was replaced, and the new one is locked by {by}")
            write(descriptor, last.as_json())
        except (OSError, LockFolderError) as error:
            (self._loose if loose else self._held).pop(device_id)
            raise error if isinstance(error, LockFolderError) else unusable(self._path(device_id), error) from error

    def _unlock(self, device_id: str, last: Holder) -> None:
        descriptor = self._descriptors[device_id]
        try:
            with suppress(OSError):  # Where it cannot be known, the next one looks once more.
                if not any(is_alive(*process) for process in last.processes):
                    os.ftruncate(descriptor, 0)
        finally:
            filelock.unlock_descriptor(descriptor)

    def holder(self, device_id: str) -> Holder | None:
        """Return who has the device now, or whose processes are still alive; None if there is nobody.

        One that has the lock and has not written yet, or cannot be understood, is shown with pid 0.
        """
        return self._held.get(device_id) or who_holds(self.folder, device_id)

    def close(self) -> None:
        """Let go of everything and withdraw every want. The object can be used again."""
        self.wishes.close()
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
            # Something that cleans temporary files has deleted it: who comes next locks another one of this name.
            os.close(self._descriptors.pop(device_id))
        return None

    def _forget(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        self._held.clear()
        self._loose.clear()
        self.wishes.forget()

    def _path(self, device_id: str) -> Path:
        return lock_path(self.folder, device_id)


def who_holds(folder: Path, device_id: str) -> Holder | None:
    """As :meth:`DeviceLocks.holder`, for one who only looks: nothing is written, and no folder needs to be there."""
    path = lock_path(folder, device_id)
    try:
        descriptor = open_file(path, os.O_RDONLY)
        try:
            # Shared: two who look at the same time must not take each other for the holder.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            last = parse_holder(read(descriptor))
            # Nobody is granted the device before these have ended.
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
    """Return whether the process `pid` that was created at `created` (``psutil.Process.create_time``) still runs.

    A zombie does not: the kernel has taken its device away. Raises OSError where it cannot be known, as in a process
    that may open no more files.
    """
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < _CREATE_TIME_TOLERANCE
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return _exists(pid)


def _exists(pid: int) -> bool:
    """Return whether there is a process `pid`, of which ``/proc`` shows nothing (proc(5): hidepid); else OSError."""
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
    """Return what a lock file says; None where it makes no sense.

    Any user may have written anything there: numbers are checked, and texts are made fit for a terminal.
    """
    try:
        told = json.loads(data)
        match told:
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
    # A lock belongs to the open file, which a forked process shares: kept there, it would outlive its session.
    for locks in tuple(_INSTANCES):
        locks._forget()


os.register_at_fork(after_in_child=_forget_all)
