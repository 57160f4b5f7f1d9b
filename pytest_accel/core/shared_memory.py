"""Files in shared memory (``/dev/shm``) that killed ranks had open.

The file system does not record which process has created a file, and all programs of a user share the folder. A rank
that has a file open may have created it, or read a file of the driver. So none is removed here. torch's manager and the
resource trackers of Python and loky know what their clients have created, and remove it (`kill.SHM_MANAGER`). What a
killed rank has created in another way, such as NCCL's segments, is only named at the end of the session.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from time import sleep
from typing import NamedTuple

import psutil

from pytest_accel.core.clock import monotonic

FOLDER = os.path.realpath("/dev/shm")
_REMOVAL_TIMEOUT = 3.0
"""Seconds in which files may still be removed by torch's manager, which waits for 2 s after its last client."""
_INTERVAL = 0.05
_SHOWN = 10
"""Number of files that are named."""


class SharedFile(NamedTuple):
    """A file in shared memory; the inode distinguishes files that have had the same name."""

    name: str
    inode: int


def files() -> frozenset[SharedFile]:
    """Return this user's files in shared memory."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    found.add(SharedFile(entry.name, entry.inode()))
    return frozenset(found)


def opened_by(ranks: Iterable[int], before: Collection[SharedFile]) -> frozenset[SharedFile]:
    """Return the files that processes of `ranks` (process ids) have open or mapped, without those that are in `before`.

    Takes a few microseconds if there is no new file.
    """
    new = files() - frozenset(before)
    if not new:
        return new
    names: set[str] = set()
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(rank)
            for one in (process, *process.children(recursive=True)):
                names |= _names_of(one.pid)
    return frozenset(file for file in new if file.name in names)


def describe_left(opened: Collection[SharedFile]) -> list[str]:
    """Return lines about the files in `opened` that still exist and that no process uses.

    Wait for their removal by the programs that clean up.
    """
    deadline = monotonic() + _REMOVAL_TIMEOUT
    while (left := files() & frozenset(opened)) and monotonic() < deadline:
        sleep(_INTERVAL)
    used = {name for path in Path("/proc").glob("[0-9]*") for name in _names_of(int(path.name))} if left else ()
    lines = []
    for file in sorted(left):
        with contextlib.suppress(OSError):
            if file.name not in used:
                lines.append(f"{file.name} ({os.stat(os.path.join(FOLDER, file.name)).st_size} bytes)")
    more = len(lines) - _SHOWN
    return lines if more <= 0 else [*lines[:_SHOWN], f"... and {more} more"]


def _names_of(pid: int) -> set[str]:
    """Return the names in shared memory that a process has open or mapped; none if it may not be inspected."""
    return {path.removeprefix(f"{FOLDER}/") for path in _paths_of(pid) if path.startswith(f"{FOLDER}/")}


def _paths_of(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").split("\n"):
            if FOLDER in line:
                yield f"/{line.partition(' /')[2]}"
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{descriptor}")
