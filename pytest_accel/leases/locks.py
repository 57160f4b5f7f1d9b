"""One lock a device for all sessions and all users of the machine.

The folder (``$PYTEST_ACCEL_LOCK_DIR``, else ``pytest-accel-locks`` in the temporary directory) holds

- for each device ``NAME.lock``: whoever has the kernel's lock on it has the device. The kernel drops it when the holder
  dies. What the file says (:class:`Holder`) is written under the lock and emptied before the lock is dropped. The file
  is never deleted: one that is deleted while somebody has it open makes room for a second lock.
- in ``wants`` one file for each session that waits: which devices it would take, and since when. A session keeps its
  own file fresh; one that has not been touched for two seconds counts for nothing.

Folders are sticky and world-writable, lock files are readable and writable by all whatever the umask, because the
session that creates them is not the only one that needs them. No name in them is ever followed as a symbolic link.

The locks are filelock's native ones, taken on descriptors that stay open from one lease to the next: a path lock of
filelock opens, resolves and closes its file each time, which costs more than all the rest of a lease.

Importing this module imports filelock and psutil: import it only where locks are needed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import pwd
import re
import secrets
import stat
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import filelock
import psutil

VARIABLE = "PYTEST_ACCEL_LOCK_DIR"
_WANT_REFRESH = 0.5
_WANT_STALE = 2.0
_WANT_ABANDONED = 60.0
_CONTENT_LIMIT = 64 * 1024
# psutil adds the kernel's boot time, which moves by up to a second when the clock is adjusted, to a count of ticks.
_CREATE_TIME_TOLERANCE = 1.5


class LockFolderError(Exception):
    """The lock folder cannot be used; the message names the path and what is wrong with it."""


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
        uid = os.getuid()
        try:
            user = pwd.getpwuid(uid).pw_name
        except KeyError:
            user = str(uid)
        return cls(os.getpid(), user, test, time.time())

    def as_json(self) -> dict[str, object]:
        """What the lock file says."""
        return {name: getattr(self, name) for name in self.__slots__}


class DeviceLocks:
    """The locks of one session. Not thread-safe: the broker calls it under its own lock.

    A process that is forked from this one inherits no lock: there, the object holds nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Create the folder where it is missing; its parent must exist.

        Raises :class:`LockFolderError` where the folder cannot be created or written, or is no real directory.
        """
        self.folder = folder or default_folder()
        self._wants = self.folder / "wants"
        self._prepare()
        self._descriptors: dict[str, int] = {}
        self._held: dict[str, Holder] = {}
        self._want_file = self._wants / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        self._want_descriptor: int | None = None
        self._wanting: dict[str, float] = {}
        self._want_touched = 0.0
        _INSTANCES.add(self)

    def try_acquire(self, device_id: str, holder: Holder) -> bool:
        """Take the device if nobody has it and no process of its last lease is alive, and say that `holder` has it.

        Never waits. Raises :class:`LockFolderError` where the files cannot be used.
        """
        if device_id in self._held:
            return False
        try:
            descriptor = self._lock(device_id)
            if descriptor is None:
                return False
            try:
                last = _parse(_read(descriptor))
                if last is not None and any(is_alive(*process) for process in last.processes):
                    filelock.unlock_descriptor(descriptor)
                    return False
                _write(descriptor, holder.as_json())
            except BaseException:
                filelock.unlock_descriptor(descriptor)
                raise
        except OSError as error:
            raise _unusable(self._path(device_id), error) from error
        self._held[device_id] = holder
        return True

    def update(self, device_id: str, holder: Holder) -> None:
        """Say something else about a device that this session holds.

        Raises KeyError for one that it does not hold, :class:`LockFolderError` where it cannot be written.
        """
        if device_id not in self._held:
            raise KeyError(f"{device_id} is not held by this session, which holds {sorted(self._held)}")
        self._held[device_id] = holder
        try:
            _write(self._descriptors[device_id], holder.as_json())
        except OSError as error:
            raise _unusable(self._path(device_id), error) from error

    def release(self, device_id: str) -> None:
        """Let go of a device that this session holds; KeyError for one that it does not hold.

        What was said of it stays while a process of the lease is alive, so that the next one waits for its end.
        """
        holder = self._held.pop(device_id)
        descriptor = self._descriptors[device_id]
        try:
            if not any(is_alive(*process) for process in holder.processes):
                os.ftruncate(descriptor, 0)
        finally:
            filelock.unlock_descriptor(descriptor)

    def holder(self, device_id: str) -> Holder | None:
        """Who has the device now; None where nobody has, whatever a dead holder left written.

        One that has the lock and has not written yet, or cannot be understood, is shown with pid 0.
        """
        return self._held.get(device_id) or who_holds(self.folder, device_id)

    def want(self, since: Mapping[str, float]) -> None:
        """Tell the other sessions which devices this one waits for, and since when (seconds since the epoch).

        Replaces what was said before; an empty mapping withdraws it. Call it at least every second while it holds.
        Raises :class:`LockFolderError` where it cannot be written.
        """
        now = time.monotonic()
        if since == self._wanting and (not since or now - self._want_touched < _WANT_REFRESH):
            return
        try:
            if self._want_descriptor is not None and not os.fstat(self._want_descriptor).st_nlink:
                os.close(self._want_descriptor)
                self._want_descriptor = None
            if self._want_descriptor is None:
                access = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._want_descriptor = os.open(self._want_file, access, 0o644)
                os.fchmod(self._want_descriptor, 0o644)
            _write(self._want_descriptor, dict(since))
        except OSError as error:
            raise _unusable(self._want_file, error) from error
        self._wanting, self._want_touched = dict(since), now

    def rivals(self) -> dict[str, float]:
        """The devices that other sessions wait for, each with the time since which the first of them does."""
        earliest: dict[str, float] = {}
        try:
            names = os.listdir(self._wants)
        except OSError:
            return earliest
        for name in names:
            if name.endswith(".json") and name != self._want_file.name:
                for device, since in _read_want(self._wants / name).items():
                    earliest[device] = min(since, earliest.get(device, since))
        return earliest

    def wanted(self, device_id: str) -> bool:
        """Whether another session waits for the device."""
        return device_id in self.rivals()

    def close(self) -> None:
        """Let go of everything and withdraw every want. The object can be used again."""
        if self._want_descriptor is not None:
            self._want_file.unlink(missing_ok=True)
        for device_id in tuple(self._held):
            self.release(device_id)
        self._forget()

    def _lock(self, device_id: str) -> int | None:
        for _ in range(2):
            descriptor = self._descriptors.get(device_id)
            if descriptor is None:
                path = self._path(device_id)
                if not os.path.lexists(path):
                    self._prepare()
                    _create_shared(path)
                descriptor = self._descriptors[device_id] = _open(path)
            if not filelock.lock_descriptor(descriptor, blocking=False):
                return None
            if os.fstat(descriptor).st_nlink:
                return descriptor
            # Something that cleans temporary files has deleted it: who comes next locks another one of this name.
            os.close(self._descriptors.pop(device_id))
        return None

    def _forget(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        self._held.clear()
        if self._want_descriptor is not None:
            os.close(self._want_descriptor)
        self._want_descriptor, self._wanting = None, {}

    def _path(self, device_id: str) -> Path:
        return self.folder / f"{file_name(device_id)}.lock"

    def _prepare(self) -> None:
        prepare_folder(self.folder)
        prepare_folder(self._wants)


def default_folder() -> Path:
    """``$PYTEST_ACCEL_LOCK_DIR``, else ``pytest-accel-locks`` in the temporary directory."""
    named = os.environ.get(VARIABLE)
    return Path(named).absolute() if named else Path(tempfile.gettempdir(), "pytest-accel-locks")


def file_name(device_id: str) -> str:
    """`device_id` as a file name: itself where it is one, else made safe and told apart by a hash."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", device_id)[:100]
    return safe if safe == device_id else f"{safe}.{hashlib.sha256(device_id.encode()).hexdigest()[:12]}"


def who_holds(folder: Path, device_id: str) -> Holder | None:
    """As :meth:`DeviceLocks.holder`, for one who only looks: nothing is written, and no folder needs to be there."""
    path = folder / f"{file_name(device_id)}.lock"
    try:
        descriptor = _open(path, os.O_RDONLY)
        try:
            # Shared: two who look at the same time must not take each other for the holder.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _parse(_read(descriptor)) or Holder(0, "unknown", "unknown", 0.0)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    return None


def is_alive(pid: int, created: float) -> bool:
    """Whether the process `pid` that was created at `created` (``psutil.Process.create_time``) still runs.

    A zombie does not: the kernel has taken its device away.
    """
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < _CREATE_TIME_TOLERANCE
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
    except psutil.AccessDenied:
        return True


def prepare_folder(folder: Path) -> None:
    """Make `folder` one for all users, whose names nobody else can take; :class:`LockFolderError` where that fails."""
    try:
        # A mode given to mkdir is subject to the umask.
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o1777)
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory (a symbolic link is none)", str(folder))
        for _ in range(20):
            if os.access(folder, os.W_OK | os.X_OK):
                return
            # Another user may have come between mkdir and chmod.
            time.sleep(0.005)
        raise PermissionError(errno.EACCES, "not writable for this user", str(folder))
    except OSError as error:
        raise _unusable(folder, error) from error


def _create_shared(path: Path) -> None:
    # Linked into place when its mode is right: another user must never meet a file that it may not open.
    draft = path.with_suffix(f".{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        os.fchmod(descriptor, 0o666)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(descriptor)
        os.unlink(draft)


def _open(path: Path, access: int = os.O_RDWR) -> int:
    # No O_CREAT: where fs.protected_regular is set, the kernel refuses it on another user's file in a sticky folder.
    # O_NONBLOCK: a pipe that somebody put there must not hold this process up.
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def _write(descriptor: int, content: Mapping[str, object]) -> None:
    # In place, one write and then the cut: who reads in between finds the first line whole. A file put in place by a
    # rename would do as well, but ext4 writes it to the disk at once (auto_da_alloc), which takes half a millisecond.
    data = json.dumps(content).encode() + b"\n"
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, _CONTENT_LIMIT, 0).partition(b"\n")[0]


def _parse(line: bytes) -> Holder | None:
    # Any user may have written anything here.
    try:
        match json.loads(line):
            case {
                "pid": int(pid),
                "user": str(user),
                "test": str(test),
                "since": int() | float() as since,
                "processes": list(processes),
            }:
                named = tuple((int(number), float(created)) for number, created in processes)
                return Holder(pid, user, test, float(since), named)
    except (ValueError, TypeError, RecursionError):
        pass
    return None


def _read_want(path: Path) -> dict[str, float]:
    try:
        descriptor = _open(path, os.O_RDONLY)
        try:
            age = abs(time.time() - os.fstat(descriptor).st_mtime)
            if age < _WANT_STALE:
                return {device: float(since) for device, since in json.loads(_read(descriptor)).items()}
        finally:
            os.close(descriptor)
        if age > _WANT_ABANDONED:
            path.unlink()
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    return {}


def _unusable(path: Path, error: OSError) -> LockFolderError:
    return LockFolderError(
        f"the folder for device locks cannot be used: {error.filename or path}: {error.strerror or error}. Every "
        f"session of the machine must be able to write there; ${VARIABLE} names another folder."
    )


_INSTANCES: weakref.WeakSet[DeviceLocks] = weakref.WeakSet()


def _forget_all() -> None:
    # A lock belongs to the open file, which a forked process shares: kept there, it would outlive its session.
    for locks in tuple(_INSTANCES):
        locks._forget()


os.register_at_fork(after_in_child=_forget_all)
