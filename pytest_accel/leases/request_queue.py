"""The requests that wait for leases: those of this session in their order, and those of other sessions, from files.

Sessions share devices by the policy's rule, first come, first served: a session whose request waits for a device of
another session publishes the time at which it arrived, in its wait file, and no session takes a device for a request
that has arrived later than a published one for that device. Without the order, a test of four devices starves beside a
session whose tests need one each: it never finds all four free at once. With it, each session gets half of the time.

Each waiting session has one wait file with the devices that it would take, each with the time since when it waits for
it. The session rewrites its file regularly; the others ignore a file that has not been modified for five seconds.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from json import loads
from os import close, fchmod, fstat, getpid, listdir, stat
from os import open as open_descriptor
from pathlib import Path
from time import localtime, strftime, time, time_ns

from pytest_accel.core.clock import monotonic
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.policy import Lease, Request, Shortage
from pytest_accel.leases.shared_folder import PREFIX, open_file, read, unusable, write

_REFRESH_INTERVAL = 0.5
"""Seconds after which a session rewrites its unchanged file, so that it does not become stale."""
_STALE_AFTER = 5.0
"""Seconds after which the file of another session is ignored: its process was killed or stopped, not only delayed."""
_DELETE_AFTER = 60.0
"""Seconds after which the file of another session is deleted: its session must have been killed."""
_LONGEST_WAIT = 30 * 24 * 3600.0
"""Seconds, 30 days: a time further in the past or in the future is invalid, and is ignored."""
_MTIME_RESOLUTION = 50_000_000
"""Nanoseconds after a folder's modification time from which the next change is certain to have a different time. File
systems take the time from a clock that ticks about 100 times a second or more often."""
_SUFFIX = ".wish"
_MOST_NAMES = 16
"""Number of devices that a line about a wait names: more than most machines have, but not all parts of a memory."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits for `demand`, with its arrival time and the callback that gets the lease or an error."""

    request: Request
    demand: WorldDemand
    answer: Callable[[Lease | Exception], None]
    since: float
    """Seconds since the epoch: the arrival time that is compared with the requests of other sessions."""

    def is_behind(self, others: Mapping[str, float], devices: Iterable[str]) -> bool:
        """Return True if another session has waited longer for one of `devices`.

        `others` has the arrival time of the first request of other sessions for each device that they wait for.
        """
        return any(others.get(device, math.inf) < self.since for device in devices)


class RequestQueue:
    """The waiting requests of one session in the order of arrival. Owned by the broker. Not thread-safe.

    Arrival times increase strictly along the queue, even if the clock is set back. So no request of the session is
    overtaken by a later one because of what another session waits for. Sessions compare the arrival times of
    their first requests: if one could be ahead of an earlier one, two sessions could wait for each other.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, WaitingRequest] = {}
        self._last_arrival = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[Request]:
        """The requests in the order of arrival, as the policy takes them."""
        return [waiting.request for waiting in self._waiting.values()]

    @property
    def first(self) -> WaitingRequest | None:
        """The request that arrived first."""
        return next(iter(self._waiting.values()), None)

    def get(self, request_id: int) -> WaitingRequest | None:
        """Return a request that waits, or None."""
        return self._waiting.get(request_id)

    def add(
        self, request: Request, demand: WorldDemand, answer: Callable[[Lease | Exception], None], arrival: float
    ) -> None:
        """Append a request that arrived at `arrival`."""
        self._last_arrival = max(arrival, math.nextafter(self._last_arrival, math.inf))
        self._waiting[request.id] = WaitingRequest(request, demand, answer, self._last_arrival)

    def pop(self, request_id: int) -> WaitingRequest | None:
        """Remove and return a request; None if it does not wait."""
        return self._waiting.pop(request_id, None)

    def clear(self) -> list[WaitingRequest]:
        """Remove and return all requests."""
        removed = list(self._waiting.values())
        self._waiting.clear()
        return removed

    def ahead_of(self, request_id: int) -> list[Holder]:
        """Return the holders of earlier requests that wait for the same devices or slots as the given one."""
        mine = self._waiting[request_id].request
        ahead: list[Holder] = []
        for other in self._waiting.values():
            if other.request.id == request_id:
                break
            if (mine.slots and other.request.slots) or not set(mine.candidates).isdisjoint(other.request.candidates):
                ahead.append(other.demand.holder)
        return ahead

    def awaited(self, lacking: Iterable[Shortage], unavailable: Collection[str]) -> dict[str, float]:
        """Return the devices to publish as awaited to other sessions, each with the arrival time of its request.

        These are all candidates of the requests in `lacking` that have an `unavailable` candidate.
        """
        since: dict[str, float] = {}
        for shortage in lacking:
            candidates = shortage.request.candidates
            if shortage.devices and any(device in unavailable for device in candidates):
                for device in candidates:
                    since.setdefault(device, self._waiting[shortage.request.id].since)
        return since

    def reserved(
        self, lacking: Iterable[Shortage], devices: Collection[str], others: Mapping[str, float]
    ) -> dict[str, Holder]:
        """Return those of the released `devices` that must stay locked for a request in `lacking`, with its holder.

        If they were unlocked, other sessions could take them one by one, and a request that needs several at once would
        starve. A device for which another session has waited longer is not reserved: otherwise two sessions that both
        need two devices and keep one each would deadlock.
        """
        reserved: dict[str, Holder] = {}
        for shortage in lacking:
            waiting = self._waiting[shortage.request.id]
            for device in waiting.request.candidates if shortage.devices else ():
                if device in devices and not waiting.is_behind(others, [device]):
                    reserved.setdefault(device, waiting.demand.holder)
        return reserved


# Why a request waits


@dataclass(frozen=True, slots=True)
class Obstacles:
    """The reasons why a request is not granted yet."""

    holders: Mapping[str, Holder]
    """The holders, in this or another session, of the candidates that are held."""
    slot_users: Sequence[tuple[int, Holder]]
    """The number of CPU slots and the holder of each lease that has any; empty if the request needs none."""
    slots: int
    """The number of CPU slots of the session."""
    ahead: Sequence[Holder]
    """The holders of earlier requests of this session that wait for the same devices or slots."""

    def lines(self, refused: Mapping[str, str]) -> list[str]:
        """Return a line for each obstacle; `refused` has the other devices that are not leased now, with the reason."""
        by_holder: dict[Holder, list[str]] = {}
        for name, holder in self.holders.items():
            by_holder.setdefault(holder, []).append(name)
        return [
            *(f"{count} of {self.slots} {_held(count)} by {_holder(holder)}" for count, holder in self.slot_users),
            *(f"{_names(names)} {_held(len(names))} by {_holder(holder)}" for holder, names in by_holder.items()),
            *(f"{name} {why}" for name, why in refused.items()),
            *(f"{_holder(holder)} has waited longer" for holder in self.ahead),
        ]


def _names(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"


def _held(count: int) -> str:
    return "is held" if count == 1 else "are held"


def _holder(holder: Holder) -> str:
    """Return a description of the holder: ``pid 71 (ada) for test_big.py::test_one since 10:15:00``."""
    if not holder.pid:
        return str(holder)
    moment = localtime(holder.since)
    today = moment[:3] == localtime()[:3]
    return f"{holder} since {strftime('%H:%M:%S' if today else '%Y-%m-%d %H:%M:%S', moment)}"


# Wait files


class WaitFile:
    """The wait file of one session, and a reader of the other sessions' files. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the lock folder, which the caller has prepared and checked."""
        self._folder = folder
        self._file = folder / f"{PREFIX}{getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._descriptor: int | None = None
        self._published: dict[str, float] = {}
        self._touched = 0.0
        self._other_paths: tuple[Path, ...] = ()
        self._listed_at = -1
        """The folder's modification time when `_other_paths` was listed; -1 if it must be listed again."""

    def publish(self, since: Mapping[str, float]) -> None:
        """Tell the other sessions which devices this one waits for, and since when (seconds since the epoch).

        The mapping replaces the previous one; an empty mapping ends the wait. Call this at least once a second while
        the session waits. Raises
        :class:`~pytest_accel.leases.shared_folder.LockFolderError` if the file cannot be written.
        """
        now = monotonic()
        if since == self._published and (not since or now - self._touched < _REFRESH_INTERVAL):
            return
        try:
            if self._descriptor is not None and not fstat(self._descriptor).st_nlink:
                close(self._descriptor)
                self._descriptor = None
            if self._descriptor is None:
                access = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = open_descriptor(self._file, access, 0o644)
                fchmod(self._descriptor, 0o644)
            write(self._descriptor, dict(since))
        except OSError as error:
            raise unusable(self._file, error) from error
        self._published, self._touched = dict(since), now

    def others(self) -> dict[str, float]:
        """Return the devices that other sessions wait for, each with the earliest time since when one waits for it."""
        earliest: dict[str, float] = {}
        for path in self._other_files():
            for device, since in _read_waits(path).items():
                earliest[device] = min(since, earliest.get(device, since))
        return earliest

    def _other_files(self) -> tuple[Path, ...]:
        # Cached: listing a temporary directory with thousands of files takes milliseconds, and this is called often.
        try:
            changed = stat(self._folder).st_mtime_ns
            if changed != self._listed_at:
                self._other_paths = tuple(path for path in wait_files(self._folder) if path != self._file)
                self._listed_at = changed if time_ns() - changed > _MTIME_RESOLUTION else -1
        except OSError:
            self._other_paths, self._listed_at = (), -1
        return self._other_paths

    def close(self) -> None:
        """Delete this session's file. The object can be used again."""
        if self._descriptor is not None:
            self._file.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Close the file without deleting it: in a forked process the file belongs to the parent's session."""
        if self._descriptor is not None:
            close(self._descriptor)
        self._descriptor, self._published = None, {}


def wait_files(folder: Path) -> list[Path]:
    """Return the wait files of all sessions in `folder`. Raises OSError."""
    names = listdir(folder)
    return [folder / name for name in names if name.startswith(PREFIX) and name.endswith(_SUFFIX)]


def parse_waits(data: bytes, now: float) -> dict[str, float]:
    """Return the devices in the content of a wait file, each with the time since when the session waits for it.

    Any user may have written anything to the file, so invalid content is ignored. A time that is not finite or more
    than 30 days from `now` (seconds since the epoch) is left out: it would put the session before or behind all others
    forever.
    """
    try:
        content = loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {
        device: float(since)
        for device, since in content.items()
        # Compare before converting: an integer may be too large for a float.
        if isinstance(since, (int, float)) and now - _LONGEST_WAIT <= since <= now + _LONGEST_WAIT
    }


def _read_waits(path: Path) -> dict[str, float]:
    with suppress(OSError):
        descriptor = open_file(path, os.O_RDONLY)
        try:
            now = time()
            age = abs(now - fstat(descriptor).st_mtime)
            if age < _STALE_AFTER:
                return parse_waits(read(descriptor), now)
        finally:
            close(descriptor)
        if age > _DELETE_AFTER:
            path.unlink()
    return {}
