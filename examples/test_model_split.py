"""A model that is too large for one device: its first half on one, its second half on another.

Needs two accelerators. Without any, `pytest examples --accel sim:2` runs it on two pretended ones.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn


class SplitModel(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.encoder = nn.Linear(64, 128).to(first)
        self.decoder = nn.Linear(128, 10).to(second)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(images.to(self.first)).relu()
        return self.decoder(hidden.to(self.second))


@pytest.mark.devices(2)
def test_gradients_flow_back_over_both_devices(devices, digits):
    model = SplitModel(*devices)
    images, labels = digits[:64]

    output = model(images)
    nn.functional.cross_entropy(output, labels.to(output.device)).backward()

    assert output.device == devices[1]
    assert model.encoder.weight.grad.device == devices[0]
    assert model.encoder.weight.grad.abs().sum() > 0


@pytest.mark.devices(2)
def test_the_halves_are_on_different_devices(accel):
    assert len(set(accel.ids)) == 2
