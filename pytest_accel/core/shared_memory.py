"""Files in shared memory (``/dev/shm``) that ranks have made and that outlive their world: they are removed.

Nothing in the file system says which process has made a file, and sessions of one user share the folder. So a file
counts as a world's only on evidence that is taken while its ranks live. The fork server looks when something is made
in the folder, of which inotify(7) tells it, and before it kills a world. A file that is new then, belongs to this user
and is open or mapped in a rank, or in a process that comes from one, has been made there, unless a process of no rank
has it too. One that no rank has at two looks has been made by somebody else, whoever uses it later. A rank that ends in
good order looks at itself. What they find is written to a file in the session's folder, so that the controller can do
the rest if the server is killed.

When a world has ended, its files are removed, but for those that a process still uses, as the driver, another world or
another session may: these are looked at again when the next world ends, and when the session does. What a rank has made
and closed at once, or in the last moment before it died, is not found.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from pytest_accel.core import prctl
from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import MARK
from pytest_accel.core.paths import shared_memory_path

FOLDER = os.path.realpath("/dev/shm")
_REST = 10
"""The pause between two looks, as a multiple of the time that a look takes: others may make files all the time."""


class _Note(NamedTuple):
    """Who has made a file, as far as it is known."""

    world: int | None
    """The world whose ranks have made it; None: somebody else has, whatever other notes say."""
    name: str
    inode: int


class Watch:
    """Finds out which files in shared memory the ranks of a fork server have made; a rank inherits a copy of it."""

    def __init__(self, directory: str, server: int) -> None:
        """`directory` is the session's, and `server` the number of the fork server."""
        self.descriptor = prctl.watch_for_new_files(FOLDER)
        """Readable when something has been made in the folder; None where that cannot be had."""
        self.due: float | None = None
        """When to look (`clock.monotonic`); None: not before something has been made."""
        self._record = shared_memory_path(directory, server)
        self._known = _files()
        self._unclear: set[tuple[str, int]] = set()
        """New files that nobody had open when they were seen: they may have been about to be."""
        self._rests_until = 0.0

    def heard(self) -> None:
        """Something has been made."""
        if self.descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self.descriptor, 1 << 16)  # Which file it was is seen in the folder.
            self.due = max(monotonic(), self._rests_until)

    def look_if_due(self, ranks: Mapping[int, int]) -> None:
        """Look, if it is time to. `ranks` gives the world of each rank, by its process id."""
        if self.due is None or monotonic() < self.due:
            return
        unclear, self._unclear = self._unclear, self.look(ranks)
        strange = unclear & self._unclear
        self._write({_Note(None, *one) for one in strange})
        self._unclear -= strange
        self.due = self._rests_until if self._unclear else None

    def look(self, ranks: Mapping[int, int]) -> set[tuple[str, int]]:
        """Note which new files the `ranks` have, and return the others; takes a few microseconds if none is new."""
        began = monotonic()
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
                strange = {note.name for note in notes} & _used_by_all(but=self._is_of_session)
                notes |= {_Note(None, name, inodes[name]) for name in strange}
            self._write(notes)
        ended = monotonic()
        self._rests_until = ended + _REST * (ended - began)
        return new - self._known

    def _is_of_session(self, pid: int) -> bool:
        """Return whether a process comes from one of the session's fork servers, of which a world may need several.

        One that is ending has no environment any more, and may be a rank: it is nobody else's.
        """
        with contextlib.suppress(psutil.Error):
            environment = psutil.Process(pid).environ()
            return not environment or environment.get(MARK) == os.path.dirname(self._record)
        return True

    def _write(self, notes: set[_Note]) -> None:
        if not notes:
            return
        self._known |= {(note.name, note.inode) for note in notes}
        with contextlib.suppress(OSError), open(self._record, "a") as file:  # As where the session's folder is gone.
            file.write("".join(f"{json.dumps(note)}\n" for note in notes))  # In one piece: ranks write there too.


def remove(record: str, living: Collection[int] = ()) -> None:
    """Remove what only worlds that are not among the `living` ones have made, as `record` says, and nobody uses.

    Nothing is done, at the cost of one system call, where no rank has made anything.
    """
    if not os.path.exists(record):
        return
    there = _files()
    notes = [note for note in _read(record) if (note.name, note.inode) in there]
    names = {note.name for note in notes} - {note.name for note in notes if note.world is None or note.world in living}
    for name in names - _used_by_all() if names else ():
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(FOLDER, name))


def _read(record: str) -> Iterator[_Note]:
    with open(record) as file:
        for line in file:
            with contextlib.suppress(ValueError):  # One that could not be written to its end.
                yield _Note(*json.loads(line))


def remove_all(directory: str) -> None:
    """Remove what the ranks of all fork servers of a session have made; `directory` is the session's."""
    for record in Path(directory).glob(os.path.basename(shared_memory_path(directory, "*"))):
        remove(str(record))


def _files() -> set[tuple[str, int]]:
    """This user's files, by their names and by the numbers that tell one from another that had its name before."""
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
    """The names in shared memory that a process has open or mapped; none where it may not be looked at."""
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
    """The world of the rank that `process` is, or comes from."""
    with contextlib.suppress(psutil.Error):
        for one in (process, *process.parents()):
            if one.pid in ranks:
                return ranks[one.pid]
    return None
