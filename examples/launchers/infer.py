"""Distributed inference with Accelerate: each process answers some of the prompts."""

from __future__ import annotations

import torch
from accelerate import PartialState
from torch import nn

PROMPTS = ["a dog", "a cat", "a house by the sea"]

# Accelerate looks for other processes on the CPU only where it is told to use the CPU.
state = PartialState(cpu=not torch.accelerator.is_available())
torch.manual_seed(0)
model = nn.Sequential(nn.EmbeddingBag(256, 32), nn.Linear(32, 256)).to(state.device)
with state.split_between_processes(PROMPTS) as mine:
    for prompt in mine:
        tokens = torch.tensor([list(prompt.encode())], device=state.device)
        print(f"{prompt}: {model(tokens).argmax().item()}")
state.destroy_process_group()
