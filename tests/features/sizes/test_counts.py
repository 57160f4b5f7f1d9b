"""Tests of marks that ask for as many devices or ranks as the session has."""

from __future__ import annotations

import re

import pytest

from pytest_accel.hardware.kernel_files import cpu_slots
from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_TESTS = """
    import os

    import pytest
    from tests import inner


    def note(name, number):
        if os.environ.get("RANK", "0") == "0":
            inner.note("numbers.log", name, number)


    @pytest.mark.devices("all")
    def test_devices(accel):
        note("devices", len(accel.ids))


    @pytest.mark.distributed("all", init=False)
    def test_ranks(world_size):
        note("ranks", world_size)


    @pytest.mark.distributed("all", devices_per_rank=2, init=False)
    def test_pairs(world_size):
        note("pairs", world_size)


    @pytest.mark.devices(share=0.5)
    @pytest.mark.distributed([1, "all"], backend="gloo", init=False)
    def test_shares(world_size):
        note("shares", world_size)


    @pytest.mark.distributed("all", kind="cpu", backend="gloo", init=False)
    def test_cores(world_size):
        note("cores", world_size)


    @pytest.mark.devices("all", at_least=4)
    def test_four(accel):
        note("four", len(accel.ids))
    """


def test_all_devices_of_the_session_are_used(suite: Suite) -> None:
    suite.write("test_it.py", _TESTS)
    run = suite.run("--accel", "sim:4", "--accel-ids", "sim-0,sim-1,sim-3", "-n1")
    assert run.count() == {"PASSED": 6, "SKIPPED": 1}, run.text
    numbers = ["devices 3", "ranks 3", "pairs 1", "shares 1", "shares 6", f"cores {cpu_slots()}"]
    assert sorted(suite.read("numbers.log")) == sorted(numbers)
    assert "1  needs 4 sim devices; there are 3: 3 x sim" in run.text


def test_select_knows_the_number(suite: Suite) -> None:
    suite.write("test_it.py", _TESTS)
    selected = suite.run("--collect-only", "-q", "--accel=sim:4", "--accel-select=world_size == 4 or devices == 4").text
    assert re.findall(r"<Function (\w+)>", selected) == ["test_devices", "test_ranks", "test_pairs", "test_four"]
