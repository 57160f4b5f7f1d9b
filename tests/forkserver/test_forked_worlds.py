"""Tests of the worlds of a fork server: their processes, exits and deadlines."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from pytest_accel.core.kill import KILL_TIMEOUT, Survivor
from pytest_accel.core.rank_exit import exited
from pytest_accel.core.rank_messages import RETIRED
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.world_key import WorldKey
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.forkserver import forked_worlds
from pytest_accel.forkserver.forked_worlds import ForkedWorlds, WorldSockets
from pytest_accel.forkserver.server_messages import RankExited, StartFailed, Survivors, WorldStarted

OTHER = 99
HELPER = 98
"""A child that the fork server had before its first rank."""
TRACKER = 97
"""A resource tracker that a rank has left."""


class Processes:
    """The children of a fork server, and its messages, without real processes."""

    def __init__(self, directory: str) -> None:
        self.started: list[int] = []
        self.exits: list[tuple[int, int]] = []
        self.killed: list[int] = []
        self.sent: list[Any] = []
        self.limit = 100
        spec = SessionSpec((), "/", (), directory, "/", (), (), (), (), (), False)
        self.worlds = ForkedWorlds(spec, self.start_rank, self.sent.append)

    def start_rank(self, spec: WorldSpec, rank: int, sockets: WorldSockets) -> int:
        if len(self.started) >= self.limit:
            raise BlockingIOError("no more processes")
        self.started.append(100 + len(self.started))
        return self.started[-1]

    def kill(self, pid: int) -> set[psutil.Process]:
        self.killed.append(pid)
        return set()

    def waitpid(self, pid: int, options: int) -> tuple[int, int]:
        if not self.exits:
            raise ChildProcessError
        return self.exits.pop(0)

    def start(self, number: int, ranks: int = 2) -> None:
        key = WorldKey("cpu", None, ranks, grouped=True, devices_per_rank=0)
        self.worlds.start(WorldSpec(number, key), None)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """Yield the processes and worlds of a fork server, with no limit on the number of ranks."""
    with tempfile.TemporaryDirectory() as directory:  # `tmp_path` may be too long for the path of a socket.
        monkeypatch.setattr(forked_worlds, "children_of", lambda parent: frozenset({HELPER}))
        made = Processes(directory)
        monkeypatch.setattr(os, "waitpid", made.waitpid)
        monkeypatch.setattr(forked_worlds, "kill_tree", made.kill)
        monkeypatch.setattr(forked_worlds, "kill_group", made.kill)
        monkeypatch.setattr(forked_worlds, "cleans_up", lambda pid: pid == TRACKER)
        yield made
        monkeypatch.undo()


def test_a_world_exists_until_its_last_rank_is_reaped(processes: Processes) -> None:
    worlds = processes.worlds
    processes.start(7)
    [started] = processes.sent
    assert isinstance(started, WorldStarted)
    assert (started.world, started.pids, started.port is None) == (7, (100, 101), False)
    assert worlds.world_by_pid == {100: 7, 101: 7}
    processes.exits = [(101, 9), (OTHER, 0)]
    worlds.reap()
    assert processes.sent[1:] == [RankExited(7, 1, exited(-9))]
    assert (7 in worlds, processes.killed) == (True, [101])
    processes.exits = [(100, os.EX_OK)]
    worlds.reap()
    assert processes.sent[2:] == [RankExited(7, 0, exited(0))]
    assert not worlds


def test_a_world_is_killed_when_its_time_is_over(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(forked_worlds, "monotonic", lambda: now[0])
    worlds = processes.worlds
    processes.start(1)
    processes.start(2, ranks=1)
    assert not processes.killed
    worlds.kill(1, after=5.0)
    worlds.kill(2, after=3.0)
    assert worlds.due == 103.0
    assert processes.killed == []
    now[0] = 104.0
    worlds.kill_overdue()
    assert worlds.due == 105.0
    assert processes.killed == [102]
    now[0] = 105.0
    worlds.kill_overdue()
    worlds.kill_overdue()
    assert processes.killed == [102, 100, 101]


@pytest.mark.parametrize("limit", [0, 1])
def test_a_world_that_cannot_start_is_killed_and_ends_with_its_ranks(processes: Processes, limit: int) -> None:
    processes.limit = limit
    processes.start(3)
    [failed] = processes.sent
    assert isinstance(failed, StartFailed)
    assert "no more processes" in failed.text
    assert processes.killed == processes.started
    assert len(processes.worlds) == limit
    processes.exits = [(pid, 9) for pid in processes.started]
    processes.worlds.reap()
    assert not processes.worlds


class Surviving:
    """A process that a signal does not end."""

    pid = 71
    lives = True

    def create_time(self) -> float:
        return 5.0


def test_a_world_exists_as_long_as_a_process_lives_that_was_killed_with_it(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    left = Surviving()
    monkeypatch.setattr(forked_worlds, "monotonic", lambda: now[0])
    monkeypatch.setattr(forked_worlds, "kill_tree", lambda pid: {left})
    monkeypatch.setattr(forked_worlds, "living", lambda found: {one for one in found if one.lives})
    monkeypatch.setattr(
        forked_worlds, "survivors", lambda found: tuple(Survivor(one.pid, one.create_time(), "sudo") for one in found)
    )
    worlds = processes.worlds
    processes.start(1, ranks=1)
    worlds.kill(1)
    worlds.look()
    processes.exits = [(100, 9)]
    worlds.reap()
    # The survivor comes first, so that the exit of the last rank does not end the world.
    survivors = Survivors(1, 0, (Survivor(71, 5.0, "sudo"),))
    assert processes.sent[1:] == [survivors, RankExited(1, 0, exited(-9))]
    assert 1 in worlds
    assert worlds.due is not None
    now[0] = worlds.due
    worlds.look()
    assert len(processes.sent) == 3
    left.lives = False
    now[0] = worlds.due
    worlds.look()
    assert processes.sent[3:] == [Survivors(1, 0, ())]
    assert not worlds


def test_a_rank_that_cannot_be_killed_is_reported(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    rank = Surviving()
    monkeypatch.setattr(forked_worlds, "monotonic", lambda: now[0])
    monkeypatch.setattr(forked_worlds, "kill_tree", lambda pid: {rank})
    monkeypatch.setattr(forked_worlds, "living", set)
    monkeypatch.setattr(forked_worlds, "survivors", lambda found: (Survivor(71, 5.0, "rank"),))
    worlds = processes.worlds
    processes.start(1, ranks=1)
    worlds.kill(1)
    assert worlds.due == 100.0 + KILL_TIMEOUT
    worlds.look()
    assert len(processes.sent) == 1
    now[0] = worlds.due
    worlds.look()
    assert processes.sent[1:] == [Survivors(1, 0, (Survivor(71, 5.0, "rank"),))]
    assert 1 in worlds


def test_what_a_dead_rank_has_left_is_killed(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = processes.worlds
    processes.start(1, ranks=2)
    left = {HELPER, 7}  # A process that a rank has left which ended in good order.
    monkeypatch.setattr(forked_worlds, "children_of", lambda parent: frozenset(left))
    processes.exits = [(100, RETIRED << 8)]
    worlds.reap()
    assert processes.killed == [100]
    left |= {8, TRACKER}
    processes.exits = [(101, 9)]
    worlds.reap()
    assert processes.killed == [100, 101, 8]


@pytest.mark.parametrize("crashed", [0, 1])
def test_what_a_dead_rank_has_left_is_killed_if_another_one_retires_at_the_same_time(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, crashed: int
) -> None:
    processes.start(1, ranks=1)
    processes.start(2, ranks=1)
    monkeypatch.setattr(forked_worlds, "children_of", lambda parent: frozenset({HELPER, 8}))
    processes.exits = [(100 + world, 9 if world == crashed else RETIRED << 8) for world in range(2)]
    processes.worlds.reap()
    assert processes.killed == [100, 101, 8]
    assert [(message.world, message.rank) for message in processes.sent[2:]] == [(1, 0), (2, 0)]
    assert not processes.worlds
