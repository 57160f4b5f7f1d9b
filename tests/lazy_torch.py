"""torch for the files of inner suites. It is imported when a test uses it: two seconds less in a main process."""

from __future__ import annotations

import importlib
from typing import Any


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks each object of a module whether it is a test, a fixture or a mock.
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


torch, dist, mp, rpc = map(_Module, ("torch", "torch.distributed", "torch.multiprocessing", "torch.distributed.rpc"))
