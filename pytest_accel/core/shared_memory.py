"""Removal of files in shared memory (``/dev/shm``) that ranks have leaked.

The file system does not record which process created a file, and all sessions of a user share the folder. A file
therefore counts as created by a world only if that is observed while the ranks live. The fork server scans the folder
when inotify(7) reports a new file, and before it kills a world. A rank that exits cleanly scans for its own files. A
new file of this user is attributed to a rank if the rank or one of its descendants has it open or mapped, and no
process does that does not belong to a rank. A new file that no rank uses in two scans is attributed to others, even if
a rank opens it later. The results are written to a file in the session's folder, so that the controller can remove the
files if the server is killed.

When a world has ended, its files are removed, except those that any process still uses: the driver, another world or
another session may. These are checked again when the next world ends and when the session ends. Files that a rank
closes at once, or creates just before it dies, are not found.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from pytest_accel.core import prctl
from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import session_of
from pytest_accel.core.paths import shared_memory_path

FOLDER = os.path.realpath("/dev/shm")
_PAUSE_FACTOR = 10
"""Pause between two scans as a multiple of a scan's duration, since other programs may create files all the time."""


class _Note(NamedTuple):
    """Record of who has created a file."""

    world: int | None
    """World whose ranks have created it. None: others have; this overrides all other notes about the file."""
    name: str
    inode: int


class Watch:
    """Finds the files in shared memory that the ranks of a fork server create.

    The fork server owns it, and each rank inherits a copy.
    """

    def __init__(self, directory: str, server: int) -> None:
        """`directory` is the session's folder, and `server` the number of the fork server."""
        self.descriptor = prctl.watch_for_new_files(FOLDER)
        """Readable when a file has been created in the folder; None if the system cannot report it."""
        self.due: float | None = None
        """Time of the next scan (`clock.monotonic`); None: when a file has been created."""
        self._record = shared_memory_path(directory, server)
        self._known = _files()
        self._unclaimed: set[tuple[str, int]] = set()
        """New files that no rank used in the last scan, possibly because they were just being created."""
        self._paused_until = 0.0

    def on_change(self) -> None:
        """Schedule a scan; called when `descriptor` is readable."""
        if self.descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self.descriptor, 1 << 16)  # Discard the events: the scan reads the folder.
            self.due = max(monotonic(), self._paused_until)

    def look_if_due(self, ranks: Mapping[int, int]) -> None:
        """Scan if a scan is due. `ranks` has the world of each rank, by its process id."""
        if self.due is None or monotonic() < self.due:
            return
        unclaimed, self._unclaimed = self._unclaimed, self.look(ranks)
        foreign = unclaimed & self._unclaimed
        self._write({_Note(None, *one) for one in foreign})
        self._unclaimed -= foreign
        self.due = self._paused_until if self._unclaimed else None

    def look(self, ranks: Mapping[int, int]) -> set[tuple[str, int]]:
        """Record which new files the `ranks` have, and return the other new files.

        Takes a few microseconds if there is no new file.
        """
        began = time.process_time()
        new = _files() - self._known
        if new:
            inodes = dict(new)
            this = psutil.Process()
            notes = set()
            for process in (this, *this.children(recursive=True)):
                if used := _used_by(process.pid) & inodes.keys():
                    world = _world_of(process, ranks)
                    notes |= {_Note(world, name, inodes[name]) for name in used}
            if notes:
                foreign = {note.name for note in notes} & _used_by_all(but=self._is_of_session)
                notes |= {_Note(None, name, inodes[name]) for name in foreign}
            self._write(notes)
        self._paused_until = monotonic() + _PAUSE_FACTOR * (time.process_time() - began)
        return new - self._known

    def _is_of_session(self, pid: int) -> bool:
        """Return whether a process descends from a fork server of this session; a world may use several of them.

        A process that is exiting has no environment any more. It may be a rank, so it counts as one of the session.
        """
        with contextlib.suppress(psutil.Error):
            environment = psutil.Process(pid).environ()
            return not environment or session_of(environment) == os.path.dirname(self._record)
        return True

    def _write(self, notes: set[_Note]) -> None:
        if not notes:
            return
        self._known |= {(note.name, note.inode) for note in notes}
        with contextlib.suppress(OSError), open(self._record, "a") as file:  # The folder may have been removed.
            file.write("".join(f"{json.dumps(note)}\n" for note in notes))  # One write, since ranks append to it too.


def remove(record: str, living: Collection[int] = ()) -> None:
    """Remove the files that, by `record`, only ended worlds have created, and that no process uses.

    Worlds in `living` have not ended. If there is no record, this costs one system call.
    """
    if not os.path.exists(record):
        return
    existing = _files()
    notes = [note for note in _read(record) if (note.name, note.inode) in existing]
    names = {note.name for note in notes} - {note.name for note in notes if note.world is None or note.world in living}
    for name in names - _used_by_all() if names else ():
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(FOLDER, name))


def _read(record: str) -> Iterator[_Note]:
    with open(record) as file:
        for line in file:
            with contextlib.suppress(ValueError):  # An incompletely written line.
                yield _Note(*json.loads(line))


def remove_all(directory: str) -> None:
    """Remove the files that ranks of all fork servers of the session in `directory` have created, if unused."""
    for record in Path(directory).glob(os.path.basename(shared_memory_path(directory, "*"))):
        remove(str(record))


def _files() -> set[tuple[str, int]]:
    """Return name and inode of this user's files; the inode distinguishes files that have had the same name."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    found.add((entry.name, entry.inode()))
    return found


def _used_by_all(but: Callable[[int], bool] = lambda pid: False) -> set[str]:
    """Return the names in shared memory that processes have open or mapped; `but` leaves out process ids."""
    names: set[str] = set()
    for path in Path("/proc").glob("[0-9]*"):
        if (used := _used_by(int(path.name))) and not but(int(path.name)):
            names |= used
    return names


def _used_by(pid: int) -> set[str]:
    """Return the names in shared memory that a process has open or mapped; none if it may not be inspected."""
    return {path.removeprefix(f"{FOLDER}/") for path in _paths_of(pid) if path.startswith(f"{FOLDER}/")}


def _paths_of(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").split("\n"):
            if FOLDER in line:
                yield f"/{line.partition(' /')[2]}"
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def _world_of(process: psutil.Process, ranks: Mapping[int, int]) -> int | None:
    """Return the world of `process`, a rank or a descendant of one; None if it is neither."""
    with contextlib.suppress(psutil.Error):
        for one in (process, *process.parents()):
            if one.pid in ranks:
                return ranks[one.pid]
    return None
