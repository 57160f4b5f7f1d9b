"""What the examples share."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

collect_ignore = ["failing"]  # Run them with `pytest examples/failing`.


@pytest.fixture(scope="session")
def digits() -> TensorDataset:
    """1,797 handwritten digits of 8 x 8 pixels, and what they show. A session fixture: loaded once in each rank."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
