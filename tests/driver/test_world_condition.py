"""Tests of `WorldCondition`: whether a world may be used again, and why not."""

from __future__ import annotations

from pytest_accel.driver.world_condition import WorldCondition


def test_a_world_stays_reusable_until_it_is_ruled_out() -> None:
    condition = WorldCondition()
    condition.rule_out(None, retire=False)
    assert condition.reusable
    condition.rule_out(retire=True)
    assert not condition.reusable


def test_the_first_reason_is_kept() -> None:
    condition = WorldCondition()
    condition.rule_out("rank 1 died")
    condition.rule_out("rank 0 timed out")
    condition.rule_out(retire=False)
    assert (condition.kill_reason, condition.retire) == ("rank 1 died", False)
    assert not condition.reusable
