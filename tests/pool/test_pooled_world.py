"""Tests of the states of a pooled world: every allowed transition, and the errors for all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.messages.rank_exit import ExitCause, RankExit, exited
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.pooled_world import PooledWorld, WantedObserver, WorldRequest, WorldState
from pytest_accel.pool.starter import Taken

KEY = WorldKey("cpu", None, 2, grouped=True)
DEMAND = WorldDemand(KEY, Holder.here("a test"))
SLOTS = cast(Taken, None)
LOCK_LOST = RankExit(ExitCause.LOCK_LOST)


def make_request() -> WorldRequest:
    return WorldRequest(1, DEMAND, cast(WantedObserver, None), lambda answer: None)


def make_world(number: int = 7) -> PooledWorld:
    async def make() -> PooledWorld:
        starter = LocalStarter(cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, None))
        return PooledWorld(WorldSpec(number, KEY), make_request(), starter, SLOTS)

    return asyncio.run(make())


def in_use() -> PooledWorld:
    world = make_world()
    world.hand_over(make_request())
    return world


def idle() -> PooledWorld:
    world = in_use()
    world.take_back()
    world.make_idle()
    return world


def retiring() -> PooledWorld:
    world = idle()
    world.retire()
    return world


def killed() -> PooledWorld:
    world = in_use()
    world.kill()
    return world


def gone() -> PooledWorld:
    world = killed()
    world.gone()
    return world


IN_STATE: dict[WorldState, Callable[[], PooledWorld]] = {
    WorldState.STARTING: make_world,
    WorldState.IN_USE: in_use,
    WorldState.IDLE: idle,
    WorldState.RETIRING: retiring,
    WorldState.KILLED: killed,
    WorldState.GONE: gone,
}

STARTING, IN_USE, IDLE, RETIRING, KILLED, GONE = WorldState
ALIVE = set(WorldState) - {GONE}
TRANSITIONS: dict[str, tuple[Callable[[PooledWorld], object], set[WorldState], WorldState]] = {
    "hand_over": (lambda world: world.hand_over(make_request()), {STARTING, IDLE}, IN_USE),
    "take_slots": (lambda world: world.take_slots(SLOTS), {IDLE}, IDLE),
    "take_back": (lambda world: world.take_back(), {IN_USE}, IN_USE),
    "make_idle": (lambda world: world.make_idle(), {IN_USE}, IDLE),
    "retire": (lambda world: world.retire(), {IN_USE, IDLE}, RETIRING),
    "retire quietly": (lambda world: world.retire(quietly=True), {IN_USE, IDLE}, KILLED),
    "revoke": (lambda world: world.revoke(LOCK_LOST), {IN_USE}, IN_USE),
    "kill": (lambda world: world.kill(), ALIVE, KILLED),
    "gone": (lambda world: world.gone(), ALIVE, GONE),
}
"""By name: the method that makes the transition, the states that allow it, and the state after it."""


@pytest.mark.parametrize("state", WorldState)
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_transition_is_possible_in_its_states_only(transition: str, state: WorldState) -> None:
    change, allowed, after = TRANSITIONS[transition]
    world = IN_STATE[state]()
    assert world.state is state
    if state in allowed:
        change(world)
        assert world.state is after
    else:
        with pytest.raises(RuntimeError, match="world 7"):
            change(world)
        assert world.state is state


def test_a_watcher_gets_the_exit_of_its_rank_once() -> None:
    world = in_use()
    early: list[RankExit | None] = []
    other: list[RankExit | None] = []
    late: list[RankExit | None] = []
    world.watch_exit(0, early.append)
    world.watch_exit(1, other.append)
    world.rank_exited(0, exited(3))
    world.rank_exited(0, exited(4))
    world.watch_exit(0, late.append)
    assert early == late == [exited(3)]
    assert other == []
    assert not world.ended
    world.rank_exited(1, exited(0))
    assert other == [exited(0)]
    assert world.ended


def test_a_watcher_gets_none_for_a_rank_of_a_world_that_is_gone() -> None:
    world = in_use()
    seen: list[RankExit | None] = []
    world.rank_exited(1, exited(3))
    world.watch_exit(0, seen.append)
    world.kill()
    world.gone()
    world.watch_exit(0, seen.append)
    world.watch_exit(1, seen.append)
    assert seen == [None, None, exited(3)]
