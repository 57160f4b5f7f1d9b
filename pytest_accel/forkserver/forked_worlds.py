"""The worlds of a fork server: start, kill and exit of their ranks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil

from pytest_accel.core import shared_memory
from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import KILL_TIMEOUT, cleans_up, kill_group, kill_tree, living, survivors
from pytest_accel.core.rank_exit import exited
from pytest_accel.core.rank_messages import RETIRED
from pytest_accel.core.server_messages import FilesOpened, RankExited, StartFailed, Survivors, WorldStarted
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.forkserver.world_sockets import NoLoopbackError, WorldSockets, open_sockets
from pytest_accel.rank.leaked_processes import children_of

_LOOK_INTERVAL = 0.1
"""Seconds between two looks at processes that were killed and live on."""


@dataclass(slots=True)
class _ForkedWorld:
    """The ranks of a world that the fork server has not yet reaped, and what was killed with those that it has."""

    ranks: dict[int, int] = field(default_factory=dict)
    """By process id."""
    deadline: float | None = None
    """Time at which the ranks are killed (`clock.monotonic`); None: no kill is planned."""
    killed: set[psutil.Process] = field(default_factory=set)
    """The processes that were killed, as far as they are not known to have exited."""
    look_at: float | None = None
    """Time of the next look at whether `killed` live; None: none is planned."""
    survivors: bool = False
    """True if the pool was told of processes that live on."""


class ForkedWorlds:
    """The worlds that have ranks forked from this server, which owns the object. Only this class changes their state.

    A world exists from its start until its last rank has been reaped, and all that was killed with it has exited.
    """

    def __init__(
        self,
        session: SessionSpec,
        start_rank: Callable[[WorldSpec, int, WorldSockets], int],
        send: Callable[[object], None],
        other_children: Callable[[], Iterable[int]],
    ) -> None:
        """``start_rank(spec, rank, sockets)`` returns the pid of a new rank. `send` sends a message to the pool.

        ``other_children()`` returns the pids of this process's children that are no ranks.
        """
        self._session = session
        self._start_rank = start_rank
        self._send = send
        self._other_children = other_children
        self._worlds: dict[int, _ForkedWorld] = {}
        self._known = children_of(os.getpid())
        """The children of this process that no rank has just left.

        A plugin or the preloaded module may have started some before the first rank; ranks have left the others.
        """
        self._earlier_files = shared_memory.files()

    def __len__(self) -> int:
        return len(self._worlds)

    def __contains__(self, number: int) -> bool:
        return number in self._worlds

    @property
    def world_by_pid(self) -> dict[int, int]:
        """The number of the world of each rank, by the rank's process id."""
        return {pid: number for number, world in self._worlds.items() for pid in world.ranks}

    @property
    def due(self) -> float | None:
        """Time at which the next ranks are to be killed or looked at (`clock.monotonic`), or None."""
        times = (time for world in self._worlds.values() for time in (world.deadline, world.look_at))
        return min((time for time in times if time is not None), default=None)

    def start(self, spec: WorldSpec, port: int | None) -> int:
        """Start the ranks of `spec` that belong to this server; return their number, 0 if that fails.

        `port` is that of :func:`~pytest_accel.forkserver.world_sockets.open_sockets`.
        """
        world = self._worlds[spec.world] = _ForkedWorld()
        try:
            with open_sockets(spec, self._session, port) as sockets:
                for rank in sockets.listeners:
                    world.ranks[self._start_rank(spec, rank, sockets)] = rank
                self._send(WorldStarted(spec.world, tuple(world.ranks), sockets.port))
        except Exception as error:
            text = str(error) if isinstance(error, NoLoopbackError) else traceback.format_exc()
            self.kill(spec.world)
            if not world.ranks:  # Otherwise `reap` removes the world.
                del self._worlds[spec.world]
            self._send(StartFailed(spec.world, text))
            return 0
        return len(world.ranks)

    def kill(self, number: int, after: float = 0.0) -> None:
        """Kill the ranks of a world after some seconds, in which they may exit by themselves."""
        self._worlds[number].deadline = monotonic() + after
        self.kill_overdue()

    def kill_overdue(self) -> None:
        """Kill the ranks of all worlds whose deadline has passed."""
        now = monotonic()
        for world in self._worlds.values():
            if world.deadline is not None and world.deadline <= now:
                world.deadline = None
                files = shared_memory.opened_by(world.ranks, self._earlier_files)
                if files and not self._session.remote:
                    self._send(FilesOpened(tuple(files)))
                for pid in world.ranks:
                    world.killed |= kill_tree(pid)
                if world.look_at is None and not world.survivors:
                    world.look_at = now + KILL_TIMEOUT

    def reap(self, on_other: Callable[[int], None]) -> None:
        """Collect the exit statuses of all children that have exited, and send those of ranks.

        What a rank has left running in its process group is killed, and so is what it has moved elsewhere, unless all
        these ranks have retired. ``on_other(pid)`` is called for other children.
        """
        exits = self._collect_exits(on_other)
        if not exits:
            return
        crashed = [number for number, ended in exits.items() if any(status != RETIRED << 8 for _, status in ended)]
        orphans = self._new_orphans()
        if crashed:
            # An orphan does not tell whose it was. One that lives on counts for each of these worlds.
            killed = {process for pid in orphans if not cleans_up(pid) for process in kill_tree(pid)}
            for number in crashed:
                self._worlds[number].killed |= killed
        for number, ended in exits.items():
            world = self._worlds[number]
            if not world.ranks:
                self._report_survivors(number, world)  # First: the world has not ended if there are any.
                if not world.survivors:
                    del self._worlds[number]
            for rank, status in ended:
                self._send(RankExited(number, rank, exited(os.waitstatus_to_exitcode(status))))

    def _collect_exits(self, on_other: Callable[[int], None]) -> dict[int, list[tuple[int, int]]]:
        """Reap all children that have exited, and kill the process groups of ranks.

        Return the ranks among them with their statuses, by the number of their world.
        """
        exits: dict[int, list[tuple[int, int]]] = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return exits
            if pid == 0:
                return exits
            number = self.world_by_pid.get(pid)
            if number is None:
                on_other(pid)
                continue
            world = self._worlds[number]
            exits.setdefault(number, []).append((world.ranks.pop(pid), status))
            world.killed |= kill_group(pid)

    def _new_orphans(self) -> frozenset[int]:
        """Return the processes that ranks, which have just been reaped, have left: this process adopts them."""
        children = children_of(os.getpid()).difference(self.world_by_pid, self._other_children())
        new = children - self._known
        self._known = children
        return new

    def look(self) -> None:
        """Look whether the processes that were killed live on, where that is due."""
        now = monotonic()
        for number, world in list(self._worlds.items()):
            if world.look_at is not None and world.look_at <= now:
                self._report_survivors(number, world)
                if not world.ranks and not world.survivors:
                    del self._worlds[number]

    def _report_survivors(self, number: int, world: _ForkedWorld) -> None:
        """Tell the pool which processes live on although they were killed, unless nothing has changed."""
        before, world.killed = world.killed, living(world.killed)
        world.look_at = monotonic() + _LOOK_INTERVAL if world.killed else None
        if (world.killed and not world.survivors) or (world.survivors and world.killed != before):
            world.survivors = bool(world.killed)
            self._send(Survivors(number, self._session.server, survivors(world.killed)))
