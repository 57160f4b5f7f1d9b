"""The locks between the sessions of a machine: which session has a device, and which is the next to get it.

For each device there are three files, on which sessions take the kernel's lock. The session that has ``DEVICE.lock``
has the device. The session that has ``DEVICE.wish`` waits for the device and is the next to get it: the others do not
take it, and give it up when the running test has ended. Without this order a test of four devices would starve beside
a session whose tests need one each: it would never find all four free at once. The session that has ``DEVICE.next``
waits for the wish. Each waiting session has to pass it, so a session whose turn is over does not overtake the others.

The kernel drops the locks of a process that dies, so nothing of a dead session has to be recognized, aged or deleted.
A lock belongs to the open file, which all processes share that have its descriptor: the ranks of a world get the
descriptors of their devices. A session gives a device up by closing its descriptor, never by unlocking. So a device is
free when the last process that could use it has gone, whoever was killed, and this session, too, gets it again only
then.

To replace the third file by a pause after each turn was rejected: of three sessions that pass a device on, one waited
for 0.8 s in place of 0.25 s. One ``next`` file for all devices was rejected, too: a session that waits an hour for one
device would keep other sessions from their turns on other devices.

The files say for people who holds or awaits the device (:class:`~pytest_accel.leases.demand.Holder`). No grant depends
on this. This package never deletes a lock file: another session could create and lock a second one.

Importing this module imports psutil and filelock: import it only where locks are needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from fcntl import flock
from os import close, fstat, getpid, lstat, pread, pwrite, register_at_fork
from pathlib import Path

import psutil
from filelock import lock_descriptor

from pytest_accel.core.processes import survivors
from pytest_accel.leases.demand import Holder, decode, encode
from pytest_accel.leases.shared_folder import (
    LockFolderError,
    NoLockFileError,
    create_shared,
    lock_path,
    open_lock_file,
    prepare_folder,
    unusable,
)

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""The errors of a lock that another process has: flock(2), and fcntl(2), with which NFS emulates flock."""
_CONTENT_LIMIT = 8 * 1024
"""Maximum number of bytes of a file's content: two texts, in which a character may take 12 bytes in JSON."""


class SessionLocks:
    """The locks that one session has on the devices of one kind, in one folder. No method waits for a lock.

    A process that is forked from this one inherits no lock: there, the object holds nothing.
    """

    def __init__(self, folder: Path) -> None:
        """Create the folder if it is missing; raise :class:`LockFolderError` if it must not be used."""
        prepare_folder(folder)
        self.folder = folder
        self._held: dict[tuple[str, str], int] = {}
        """The descriptor of each locked file, by device and kind of lock."""
        # A forked process shares the open files, and so the locks: it would keep them when the session has ended.
        register_at_fork(after_in_child=self.close)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all("lock"))

    def _all(self, kind: str) -> list[str]:
        """Return the devices for which this session has a lock of this kind."""
        return [device for device, what in self._held if what == kind]

    def _take(self, device: str, kind: str) -> bool:
        """Have this kind of lock from now on if possible; return success. Raises :class:`LockFolderError`."""
        if (device, kind) not in self._held:
            descriptor = _locked(self.folder, lock_path(self.folder, device, kind))
            if descriptor is None:
                return False
            self._held[device, kind] = descriptor
        return True

    def _drop(self, kind: str, devices: Iterable[str]) -> None:
        """Give up this kind of lock of these devices, as far as this session has it."""
        for device in devices:
            if (device, kind) in self._held:
                close(self._held.pop((device, kind)))

    def descriptor(self, device: str) -> int:
        """Return the descriptor of the lock of a device that this session has locked."""
        return self._held[device, "lock"]

    def lock(self, device: str) -> bool:
        """Lock a device, and return success.

        This fails if any other process has the lock, or if something that is no lock file has its name. It raises
        :class:`LockFolderError` if the file cannot be used.
        """
        return self._take(device, "lock")

    def unlock(self, device: str) -> None:
        """Give a device up; it stays locked while another process has the descriptor."""
        self._drop("lock", [device])

    def describe(self, device: str, holder: Holder, kind: str = "lock") -> None:
        """Tell people who has this kind of lock of a device, which is this session's."""
        # Readers read the first line. The rest of a longer one stays: to truncate the file takes as long as to lock it.
        with suppress(OSError):  # For example a full disk. The lock is held, whatever the file says.
            pwrite(self._held[device, kind], encode(holder), 0)

    def wish(self, wishes: Mapping[str, Holder]) -> None:
        """Wish for these devices and no others; the values are for people. Call this again while a wish is missing.

        Other sessions give a device up only while this session has the wish for it.
        """
        self.step_back([device for device in self._all("wish") if device not in wishes])
        missing = next((device for device in sorted(wishes) if not self._move_up(device, wishes[device])), None)
        if missing is not None:
            # Hold no later wish while an earlier one is missing, so that no two sessions wait for each other.
            self.step_back([device for device in self._all("wish") if device > missing])
        self._drop("next", [device for device in self._all("next") if device != missing])

    def _move_up(self, device: str, holder: Holder) -> bool:
        """Queue for the wish, and lock it if possible; return whether this session has it."""
        if not self.wishes(device):
            with suppress(LockFolderError):  # Without its turn, the session may still find the device free.
                # Keep the first lock until the second: sessions get the wish in the order of their arrival.
                if self._take(device, "next") and self._take(device, "wish"):
                    self.describe(device, holder, "wish")
        return self.wishes(device)

    def step_back(self, devices: Iterable[str]) -> None:
        """Drop the wishes for these devices, as far as this session has them."""
        self._drop("wish", devices)

    def wishes(self, device: str) -> bool:
        """Return True if this session has the wish for a device: it is the next to get it."""
        return (device, "wish") in self._held

    def is_wished_elsewhere(self, device: str) -> bool:
        """Return True if another session is the next to get a device."""
        if not self.wishes(device):
            with suppress(OSError):  # Nobody can be next without a wish file.
                descriptor = open_lock_file(lock_path(self.folder, device, "wish"), os.O_RDONLY)
                try:
                    return _is_locked(descriptor)
                finally:
                    close(descriptor)
        return False

    def check(self) -> None:
        """Raise :class:`LockFolderError` if the lock file of a locked device was deleted, moved or replaced.

        Another session may have locked a new file, and use the device. To create and lock a new file here was rejected:
        this would help only if no other session was faster.
        """
        for device in self:
            if not _is_in_place(self.descriptor(device), path := lock_path(self.folder, device)):
                why = f"the lock of {device} was lost, since its lock file was deleted or moved: {path}"
                raise LockFolderError(f"{why}; this session ends its ranks, because another session may use the device")

    def close(self) -> None:
        """Give everything up. The object can be used again."""
        while self._held:
            close(self._held.popitem()[1])


def who_holds(folder: Path, device: str, what: str = "lock") -> Holder | None:
    """Return the holder of a device's lock, or None: a session, or an entry with the file's name that is no lock file.

    With `what` = ``wish``, return the session that is the next to get the device. No file is written, and `folder` need
    not exist. Raises :class:`LockFolderError` if the file cannot be read.
    """
    path = lock_path(folder, device, what)
    try:
        descriptor = open_lock_file(path, os.O_RDONLY)
        try:
            line = pread(descriptor, _CONTENT_LIMIT, 0).partition(b"\n")[0]
            return (decode(line) or Holder.unknown()) if _is_locked(descriptor) else None
        finally:
            close(descriptor)
    except FileNotFoundError:
        return None
    except NoLockFileError as error:
        return Holder.unknown(error.about)
    except OSError as error:
        raise unusable(path, error) from error


def who_keeps(folder: Path, device: str) -> Holder | None:
    """Return the holder of a device that this session does not hold, like :func:`who_holds`.

    If the last holder was this session, or a session that has ended, name the processes that it has left instead.
    """
    holder = who_holds(folder, device)
    if holder is None or not holder.pid or (holder.pid != getpid() and psutil.pid_exists(holder.pid)):
        return holder
    path = lock_path(folder, device)
    left = [one for one in psutil.process_iter() if one.pid != getpid() and _has_open(one, path)]
    names = ", ".join(survivors(left))
    return Holder.unknown(f"{names}, which {holder.test} has left") if names else holder


def _locked(folder: Path, path: Path) -> int | None:
    """Return the descriptor of a lock file that has been locked, or None if that is impossible for now."""
    try:
        for _ in range(3):
            try:
                descriptor = open_lock_file(path)
            except NoLockFileError:
                # Any user can give a directory or a pipe this name. The device counts as held: nobody can lock it.
                return None
            except FileNotFoundError:
                prepare_folder(folder)
                create_shared(path)
                continue
            with ExitStack() as undo:
                undo.callback(close, descriptor)
                # filelock's FileLock was rejected: it does not give its descriptor. Try twice: another session may be
                # testing the lock right now (`_is_locked`).
                if not (lock_descriptor(descriptor, blocking=False) or lock_descriptor(descriptor, blocking=False)):
                    return None
                if _is_in_place(descriptor, path):
                    undo.pop_all()
                    return descriptor
            # A cleaner of temporary files has deleted this file, and another session may lock a new one: try again.
    except OSError as error:
        raise unusable(path, error) from error
    return None


def _is_locked(descriptor: int) -> bool:
    """Return True if another open file of the same lock file has the lock. Raises OSError."""
    try:
        # A shared lock, so that two concurrent calls do not take each other for the holder.
        flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno in _HELD:
            return True
        raise
    return False


def _is_in_place(descriptor: int, path: Path) -> bool:
    """Return False if the open lock file was deleted, moved or replaced: another session could lock a new one."""
    try:
        return os.path.samestat(fstat(descriptor), lstat(path))
    except OSError:
        return False


def _has_open(process: psutil.Process, path: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return any(file.path == str(path) for file in process.open_files())
    return False
