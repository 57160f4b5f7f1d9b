"""Tests of the places by which the driver and the ranks mean the same test."""

from __future__ import annotations

from pytest_accel.core.node_refs import places


def test_places_differ_unless_both_processes_have_collected_the_same_tests_of_a_function() -> None:
    twins = places(["t[a]", "t[b]", "t[a]", "u"], ["t", "t", "t", "u"])
    assert len(set(twins)) == 4
    assert places(["u"], ["u"]) == twins[3:]
    assert not {*places(["t[a]", "t[b]"], ["t"] * 2), *places(["t[a]", "t[a]", "t[b]"], ["t"] * 3)} & set(twins)


def test_the_order_of_different_names_does_not_matter() -> None:
    assert set(places(["t[a]", "t[b]"], ["t", "t"])) == set(places(["t[b]", "t[a]"], ["t", "t"]))


def test_functions_whose_tests_have_one_name_are_not_confused() -> None:
    one, other = places(["adds", "adds"], ["f", "g"])
    assert places(["adds"], ["g"]) == [other] != [one]
