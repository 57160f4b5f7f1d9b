"""Tests of the policy that decides which idle worlds end."""

from __future__ import annotations

from pytest_accel.pool.idle_policy import IdleWorld, to_retire


def idle(number: int, since: float = 0.0, *, ranks: int = 1, devices: bool = True) -> IdleWorld:
    return IdleWorld(number, ranks, since, devices)


def test_a_world_keeps_devices_idle_for_half_a_minute() -> None:
    worlds = [idle(1), idle(2, 0.5), idle(3, devices=False)]
    assert to_retire(worlds, 30.0) == []
    assert to_retire(worlds, 30.4) == [(1, "idle for 30 s")]
    assert to_retire(worlds, 1e6) == [(1, "idle for 30 s"), (2, "idle for 30 s")]


def test_the_worlds_that_have_been_idle_longest_end_if_too_many_ranks_are_idle() -> None:
    worlds = [idle(number, float(number), ranks=2, devices=False) for number in (0, 2, 3)]

    def ending(kept: int) -> list[int]:
        return [number for number, _ in to_retire(worlds, 3.0, kept)]

    assert ending(6) == []
    assert ending(4) == [0]
    assert ending(0) == [0, 2], "the last one stays, however many ranks it has"
    assert to_retire(worlds, 3.0, 4) == [(0, "more ranks were idle than are kept")]


def test_ranks_that_end_anyhow_do_not_count_as_too_many() -> None:
    worlds = [idle(1, ranks=8), idle(2, 25.0, ranks=8), idle(3, 25.0, ranks=8)]
    assert to_retire(worlds, 40.0, 16) == [(1, "idle for 30 s")]
