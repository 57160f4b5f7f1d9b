"""A model answers many prompts, each rank some of them: with Accelerate, and with nothing but torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

PROMPTS = ["a dog", "a cat", "a house by the sea"]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(256, 32), nn.Linear(32, 256))


def answer(model: nn.Module, prompt: str) -> list[int]:
    """Eight tokens, each the likeliest after those before it."""
    device = model[1].weight.device
    tokens = list(prompt.encode())
    for _ in range(8):
        tokens.append(int(model(torch.tensor([tokens], device=device)).argmax()))
    return tokens[-8:]


def in_order(answers: list[list]) -> list:
    return [one for rank in answers for one in rank]


@pytest.mark.distributed(2)
def test_with_accelerate(device, gather):
    """`PartialState` finds the process group that is already there."""
    state = PartialState(cpu=device.type == "cpu")
    model = make_model().to(state.device)

    with state.split_between_processes(PROMPTS) as mine:
        answers = [answer(model, prompt) for prompt in mine]

    alone = make_model()
    assert in_order(gather(answers)) == [answer(alone, prompt) for prompt in PROMPTS]


@pytest.mark.distributed(2, init=False)
def test_with_torch_alone(device, rank, world_size):
    """`init=False`: the code under test makes its process group itself, as it does under torchrun."""
    dist.init_process_group(rank=rank, world_size=world_size)
    model = make_model().to(device)

    answers = [None] * world_size
    dist.all_gather_object(answers, answer(model, PROMPTS[rank]))
    dist.destroy_process_group()

    alone = make_model()
    assert answers == [answer(alone, prompt) for prompt in PROMPTS[:world_size]]
