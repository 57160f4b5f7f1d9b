"""The private folders of sessions: their creation, their removal, and the proof that a session is dead.

A session's folder has a lock file. The controller and the fork servers each keep a shared lock (flock(2)) on it; the
processes that they fork close it. The kernel drops a lock with its process, whatever ends the process, and also tells
processes of other containers that it is held. So a session is dead if nobody holds a lock, and no process id has to be
trusted.

If all of a session's processes are killed at the same moment, none of them kills what tests have started, or removes
the folder. The next session of the user does (`remove_dead`). The record in the lock file says where the session's
processes can be found: in this container since this start of the machine, or nowhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

from pytest_accel.core.clock import monotonic
from pytest_accel.core.folder_trust import TEMPORARY, ensure_own_folder, ensure_safe

_PREFIX = "accel-"
_LOCK = "session.lock"
_LONGEST_DIRECTORY = 80
"""Characters; the path of a socket may have at most 104 on macOS and 108 on Linux (unix(7))."""
_LONGEST_RECORD = 1 << 14
"""Bytes of a record; a path has 4096 characters at most."""
_TIMEOUT = 5.0
"""Seconds after which no further folder of a dead session is removed."""
_KILL_TIMEOUT = 1.0
"""Seconds for which a session waits for the exit of what a dead session has left.

Nearly always they take milliseconds. If a process is in uninterruptible sleep, each later session tries again.
"""
_claims: dict[str, tuple[int, os.stat_result]] = {}
"""The locked lock file of each folder that this process uses: its descriptor, and what it is."""


def create() -> str:
    """Create and claim a folder for a session, whose path is short enough for sockets, and return its path.

    If other users can write to every temporary folder, they can replace the new folder. The sockets are protected even
    then (`unix_sockets`).
    """
    directory = _create()
    claim(directory)
    return directory


def _create() -> str:
    try:
        ensure_safe(tempfile.gettempdir())
    except OSError:
        return tempfile.mkdtemp(prefix=_PREFIX, dir=TEMPORARY)
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    if len(directory) <= _LONGEST_DIRECTORY:
        return directory
    rmtree(directory)
    return tempfile.mkdtemp(prefix=_PREFIX, dir=TEMPORARY)


def ensure(directory: str) -> None:
    """Create the session's folder again if a fork server that crashed has removed it, and claim it."""
    ensure_own_folder(directory)
    claim(directory)


def claim(directory: str) -> None:
    """Lock the lock file of the session's folder, as long as this process lives or until :func:`remove`.

    If that is impossible, as on a file system without locks, nobody can prove that the session is dead.
    """
    path = os.path.join(directory, _LOCK)
    with suppress(OSError):
        if _is_claimed(directory) and os.path.samestat(_claims[directory][1], os.lstat(path)):
            return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # After locking: a record without a lock means that the session is dead.
            if not os.fstat(descriptor).st_size:
                os.write(descriptor, _record(directory))
        except OSError:
            os.close(descriptor)
            raise
        _unclaim(directory)
        _claims[directory] = descriptor, os.fstat(descriptor)


def remove(directory: str) -> None:
    """Remove the session's folder. A folder that cannot be removed is left to a later session's :func:`remove_dead`."""
    with suppress(Exception):  # A conftest may have replaced `os.unlink`, which rmtree uses, by a function that raises.
        rmtree(directory, ignore_errors=True)
    _unclaim(directory)


def _is_claimed(directory: str) -> bool:
    """Return whether this process has the folder's lock file open. A test may have closed it, and opened another."""
    with suppress(KeyError, OSError):
        descriptor, facts = _claims[directory]
        return os.path.samestat(os.fstat(descriptor), facts)
    return False


def _unclaim(directory: str) -> None:
    if _is_claimed(directory):
        os.close(_claims[directory][0])
    _claims.pop(directory, None)


def _unclaim_all() -> None:
    # A process that a test forks may outlive the session, which must not count as alive then.
    for directory in list(_claims):
        _unclaim(directory)


os.register_at_fork(after_in_child=_unclaim_all)


def _record(directory: str) -> bytes:
    """Return the record of a session with this folder."""
    return json.dumps([directory, _surroundings()]).encode()


def _surroundings() -> list[str | int] | None:
    """Return what identifies the processes that this process can see; None if it is not known.

    That is this start of the machine, and the namespace of process ids.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return [machine, os.stat("/proc/self/ns/pid").st_ino]
    except OSError:
        return None


def remove_dead() -> list[str]:
    """Kill what dead sessions of this user have left running, and remove their folders.

    Return the processes that live on although they were killed. What is not proved to belong to such a session is left
    alone. If none is dead, this lists the temporary folder only.
    """
    deadline = monotonic() + _TIMEOUT
    survivors: list[str] = []
    for parent in dict.fromkeys((tempfile.gettempdir(), TEMPORARY)):
        with suppress(OSError):
            ensure_safe(parent)  # Nobody else can replace a folder while it is being removed.
            for name in os.listdir(parent):
                if name.startswith(_PREFIX) and monotonic() < deadline:
                    with suppress(OSError):
                        survivors += _remove_if_dead(os.path.join(parent, name), deadline)
    return survivors


def _remove_if_dead(path: str, deadline: float) -> tuple[str, ...]:
    """Remove the folder `path`, and what its session has left, if it belongs to a dead session. May raise OSError.

    Wait for the exit of killed processes until `deadline` (`clock.monotonic`) at most, and return those that live on.
    """
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        return ()
    descriptor = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Raises BlockingIOError if the session lives, or if another session is removing the folder.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:
            return ()  # The session has just ended.
        try:
            directory, surroundings = json.loads(os.read(descriptor, _LONGEST_RECORD))
        except (ValueError, TypeError, RecursionError):
            return ()
        known = isinstance(directory, str) and surroundings is not None
        if known and surroundings == _surroundings() and os.path.realpath(directory) == os.path.realpath(path):
            return _remove_session(directory, deadline)
        return ()
    finally:
        os.close(descriptor)


def _remove_session(directory: str, deadline: float) -> tuple[str, ...]:
    """Kill what a dead session has left running, and remove its folder, unless a process lives on at `deadline`.

    Return the processes that live on.
    """
    import psutil  # Imported here, like the modules below, because it is rarely needed.

    from pytest_accel.core import kill

    try:
        this = psutil.Process()
        for process in (this, *this.parents()):
            with suppress(psutil.AccessDenied):  # Another user's, and so not a process of the dead session.
                if kill.session_of(process.environ()) == directory:
                    return ()  # A test of the dead session has started the program that has started this session.
        timeout = min(_KILL_TIMEOUT, deadline - monotonic())
        if left := kill.kill_marked(directory, owner=os.geteuid(), timeout=timeout):
            return left
    except psutil.Error:
        return ()  # An ancestor is unknown, as one that has just ended. It may be a process of the dead session.
    for name in os.listdir(directory):
        if name != _LOCK:  # Removed last: without it, the next session could not tell what the rest is.
            path = os.path.join(directory, name)
            if os.path.isdir(path) and not os.path.islink(path):
                rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    rmtree(directory, ignore_errors=True)
    return ()
