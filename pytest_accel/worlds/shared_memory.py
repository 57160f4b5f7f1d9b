"""Files in shared memory (``/dev/shm``) that ranks have made and that outlive their world: they are removed.

Nothing in the file system says which process has made a file, and sessions of one user share the folder. So a file
counts as a world's only on evidence that was taken while its ranks lived: it was not there when the fork server
started, its owner is this user, and a rank, or a process that comes from one, had it open or mapped. The fork server
looks when something is made in the folder, of which inotify(7) tells it, and before it kills a world; a rank that ends
in good order looks at itself. What they find is written to a file in the session's folder, so that the controller can
do the rest if the server is killed.

When the world has ended its files are removed, but for those that a process still uses, as the driver, another world or
another session may: these are looked at again when the next world ends, and when the session does. What a rank has made
and closed at once, or in the last moment before it died, is not found.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from pytest_accel.clock import monotonic
from pytest_accel.worlds import linux
from pytest_accel.worlds.files import shared_memory_path

FOLDER = os.path.realpath("/dev/shm")
_REST = 10
"""So many times as long as a look has taken there is none: others may make files all the time."""


class _Made(NamedTuple):
    """A file that ranks of a world have made."""

    world: int
    name: str
    inode: int


class Watch:
    """Finds out which files in shared memory the ranks of a fork server have made; a rank inherits a copy of it."""

    def __init__(self, directory: str, server: int) -> None:
        """`directory` is the session's, and `server` the number of the fork server."""
        self.descriptor = linux.watch_for_new_files(FOLDER)
        """Readable when something has been made in the folder; None where that cannot be had."""
        self.due: float | None = None
        """When to look (`clock.monotonic`); None: not before something has been made."""
        self._record = shared_memory_path(directory, server)
        self._not_ours = _names()
        self._found: set[tuple[str, int]] = set()
        self._rests_until = 0.0

    def heard(self) -> None:
        """Something has been made."""
        if self.descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self.descriptor, 1 << 16)  # Which file it was is seen in the folder.
            self.due = max(monotonic(), self._rests_until)

    def look_if_due(self, ranks: Mapping[int, int]) -> None:
        """Look, if it is time to. `ranks` gives the world of each rank, by its process id."""
        if self.due is not None and monotonic() >= self.due:
            self.look(ranks)

    def look(self, ranks: Mapping[int, int]) -> None:
        """Write down what the `ranks` have made since the last look; a few microseconds if there is nothing new."""
        began = monotonic()
        new = {name for name, _ in _names() - self._not_ours - self._found if _is_own(name)}
        if new:
            self._find(new, ranks)
        ended = monotonic()
        self.due, self._rests_until = None, ended + _REST * (ended - began)

    def _find(self, new: set[str], ranks: Mapping[int, int]) -> None:
        made = []
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            if used := _used_by(process.pid) & new:
                world = _world_of(process, ranks)
                made += [_Made(world, name, _inode(name)) for name in used] if world is not None else []
        with open(self._record, "a") as file:
            file.write("".join(f"{json.dumps(one)}\n" for one in made))  # In one piece, since ranks write there too.
        self._found |= {(one.name, one.inode) for one in made}


def remove(record: str, living: Collection[int] = ()) -> None:
    """Remove what `record` has of worlds that are not among the `living` ones, but for what a process uses.

    Nothing is done, at the cost of one system call, where no rank has made anything.
    """
    if not os.path.exists(record):
        return
    with open(record) as file:
        made = {_Made(*json.loads(line)) for line in file}
    made = {one for one in made if _inode(one.name) == one.inode}
    names = {one.name for one in made} - {one.name for one in made if one.world in living}
    used = {name for process in Path("/proc").glob("[0-9]*") for name in _used_by(process.name)} if names else set()
    for name in names - used:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(FOLDER, name))


def remove_all(directory: str) -> None:
    """Remove what the ranks of all fork servers of a session have made; `directory` is the session's."""
    for record in Path(directory).glob(os.path.basename(shared_memory_path(directory, "*"))):
        remove(str(record))


def _names() -> set[tuple[str, int]]:
    """What is in the folder, with the number by which a name that is used once more is told from what it was before."""
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        return {(entry.name, entry.inode()) for entry in entries}
    return set()


def _is_own(name: str) -> bool:
    with contextlib.suppress(OSError):
        status = os.lstat(os.path.join(FOLDER, name))
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _inode(name: str) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(os.path.join(FOLDER, name)).st_ino
    return 0


def _used_by(pid: int | str) -> set[str]:
    """The names in shared memory that a process has open or mapped; none where it may not be looked at."""
    return {path.removeprefix(f"{FOLDER}/") for path in _paths_of(pid) if path.startswith(f"{FOLDER}/")}


def _paths_of(pid: int | str) -> Iterator[str]:
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
