"""Tests of the public names of `pytest_accel`: each can be imported, and used in annotations."""

from __future__ import annotations

import os

import pytest

import pytest_accel
from pytest_accel import Accel, Gather, Launch, LaunchError, MakeMesh, RankDied


@pytest.mark.parametrize("name", pytest_accel.__all__)
def test_each_public_name_can_be_imported(name: str) -> None:
    assert getattr(pytest_accel, name).__doc__


# mypy checks these functions as it would check a user's suite.


@pytest.mark.distributed(2, kind="cpu", backend="gloo")
def test_fixtures_have_types(accel: Accel, gather: Gather, device_mesh: MakeMesh, rank: int) -> None:
    everyone: list[int] = gather(rank)
    assert everyone == [0, 1]
    assert accel.kind == "cpu"
    assert device_mesh((2,), names=("data",)).size() == 2


@pytest.mark.distributed(2, kind="cpu")
@pytest.mark.xfail(raises=RankDied, strict=True)
def test_the_error_of_a_dead_rank_has_a_public_type(rank: int) -> None:
    if rank == 1:
        os._exit(3)


def test_the_result_of_a_launch_has_a_public_type(launch: Launch) -> None:
    with pytest.raises(LaunchError):
        launch("no_script.py", launcher="python")
