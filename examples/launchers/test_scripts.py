"""Scripts, tested as people start them. `pytest examples/launchers`: a launcher that is not installed is skipped."""

from __future__ import annotations

import re

import pytest

from pytest_accel import LaunchError


def last_lines(result):
    """Return the last line of each rank as rank, world size, accuracy and weights."""
    form = re.compile(r"rank (\d+) of (\d+): accuracy (\S+), weights (\S+)")
    return [form.fullmatch(text.splitlines()[-1]).groups() for text in result.rank_stdout.values()]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed", "mpirun", "srun"])
def test_training_with_two_ranks_on_the_cpu(launch, launcher):
    """A test without a mark has no devices: its ranks run on the CPU, on any machine."""
    result = launch("train.py", "--epochs", 2, launcher=launcher, nproc=2, timeout=200)

    (rank_0, size_0, accuracy, weights), (rank_1, size_1, _, same_weights) = last_lines(result)
    assert (rank_0, size_0, rank_1, size_1) == ("0", "2", "1", "2")
    assert weights == same_weights
    assert float(accuracy) > 0.95


@pytest.mark.devices(2)
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_training_on_two_devices(launch, launcher):
    """One rank for each device of the test, which see these two and no others."""
    result = launch("train.py", "--epochs", 2, launcher=launcher, timeout=200)

    assert len(last_lines(result)) == 2


def test_each_prompt_is_answered_once(launch):
    result = launch("infer.py", launcher="accelerate", nproc=2, timeout=200)

    answered = [[line.partition(":")[0] for line in text.splitlines()] for text in result.rank_stdout.values()]
    assert answered == [["a dog", "a cat"], ["a house by the sea"]]


def test_a_wrong_argument_is_told_as_the_script_tells_it(launch):
    with pytest.raises(LaunchError, match=r"train\.py: error: argument --epochs: invalid int value: 'many'"):
        launch("train.py", "--epochs", "many", launcher="python")
