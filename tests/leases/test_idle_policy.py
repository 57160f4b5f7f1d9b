"""Tests of the policy that decides which idle worlds end."""

from __future__ import annotations

from pytest_accel.leases.idle_policy import WANTED, IdleWorld, Wanted, to_retire

NOTHING = Wanted()


def idle(number: int, since: float = 0.0, *, ranks: int = 1, devices: bool = True, room: int = 0) -> IdleWorld:
    return IdleWorld(number, ranks, since, devices, room)


def test_a_world_keeps_devices_idle_for_half_a_minute() -> None:
    worlds = [idle(1), idle(2, 0.5)]
    assert to_retire(worlds, NOTHING, 30.0) == []
    assert to_retire(worlds, NOTHING, 30.4) == [(1, "idle for 30 s")]
    assert to_retire(worlds, NOTHING, 30.6) == [(1, "idle for 30 s"), (2, "idle for 30 s")]


def test_a_world_without_devices_is_kept() -> None:
    assert to_retire([idle(1, devices=False)], NOTHING, 1e6) == []


def test_a_world_whose_devices_are_wanted_ends_at_once() -> None:
    assert to_retire([idle(1), idle(2)], Wanted(worlds=frozenset([2])), 0.0) == [(2, WANTED)]


def test_as_many_worlds_as_necessary_make_room_on_a_cluster_the_longest_idle_first() -> None:
    worlds = [idle(1, 3.0, room=2), idle(2, 1.0, room=2), idle(3, 2.0, room=2), idle(4, 0.0)]
    assert to_retire(worlds, Wanted(room=3), 3.0) == [(2, WANTED), (3, WANTED)]
    assert to_retire(worlds, Wanted(room=2), 3.0) == [(2, WANTED)]
    assert to_retire(worlds, Wanted(room=-1), 3.0) == []


def test_the_worlds_that_have_been_idle_longest_end_if_too_many_ranks_are_idle() -> None:
    worlds = [idle(number, float(number), ranks=2, devices=False) for number in (0, 2, 3)]

    def ending(kept: int) -> list[int]:
        return [number for number, _ in to_retire(worlds, NOTHING, 3.0, kept)]

    assert ending(6) == []
    assert ending(4) == [0]
    assert ending(0) == [0, 2], "the last one stays, however many ranks it has"
    assert to_retire(worlds, NOTHING, 3.0, 4) == [(0, "more ranks were idle than are kept")]


def test_ranks_that_end_anyhow_or_are_on_a_cluster_do_not_count_as_too_many() -> None:
    worlds = [idle(1, ranks=8), idle(2, ranks=8), idle(3, ranks=8, room=8), idle(4, ranks=8)]
    assert to_retire(worlds, Wanted(worlds=frozenset([1])), 0.0, 16) == [(1, WANTED)]
