"""Fixtures of all examples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset


@pytest.fixture(scope="session")
def digits() -> TensorDataset:
    """1,797 handwritten digits of 8 x 8 pixels, and what they show. A session fixture: loaded once in each rank."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`failing` and `launchers` are collected only when they are named: `pytest examples/failing`."""
    name = collection_path.name
    named = any(name in Path(argument).parts for argument in config.invocation_params.args)
    return True if name in ("failing", "launchers") and not named else None
