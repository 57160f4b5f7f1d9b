"""Settings of the process that a test has changed and not put back: found in the rank after each test, and undone.

What a fixture of a wider scope sets, and puts back at its end, is its own business and no test's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

CWD = "the working directory"
DTYPE = "torch's default dtype"
DEVICE = "torch's default device"
DETERMINISTIC = "torch.use_deterministic_algorithms"
CUDNN_DETERMINISTIC = "torch.backends.cudnn.deterministic"
CUDNN_BENCHMARK = "torch.backends.cudnn.benchmark"

Settings = Mapping[str, object]
"""What is looked at, by its name in a message; without torch's where torch is not imported."""


def look() -> dict[str, object]:
    """The settings as they are now. The working directory is left out where it has been removed."""
    found: dict[str, object] = {}
    with contextlib.suppress(OSError):
        found[CWD] = os.getcwd()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found[DTYPE] = torch.get_default_dtype()
        if hasattr(torch, "get_default_device"):  # Not before torch 2.3.
            found[DEVICE] = str(torch.get_default_device())
        # 0: off, 1: warns, 2: raises (torch.set_deterministic_debug_mode).
        found[DETERMINISTIC] = torch.get_deterministic_debug_mode()
        found[CUDNN_DETERMINISTIC] = torch.backends.cudnn.deterministic
        found[CUDNN_BENCHMARK] = torch.backends.cudnn.benchmark
    return found


def changed(before: Settings, after: Settings) -> dict[str, tuple[object, object]]:
    """Each setting that is in both and differs, with its values before and after."""
    return {name: (old, after[name]) for name, old in before.items() if name in after and after[name] != old}


class Hygiene:
    """What settings a rank's tests are held to."""

    def __init__(self) -> None:
        self._before: dict[str, object] = {}
        self._wider: set[tuple[str, object]] = set()
        """Values that fixtures of a wider scope have made, and those that they found, which they may put back."""

    def begin(self) -> None:
        """A test begins."""
        self._before = look()

    def made_by_fixture(self, before: Settings) -> None:
        """A fixture of a wider scope has been set up since `before` was looked at."""
        for name, values in changed(before, look()).items():
            self._wider.update((name, value) for value in values)

    def end(self) -> tuple[str, ...]:
        """Put back what the test has changed since it began; a line for each."""
        lines = []
        for name, (old, new) in changed(self._before, look()).items():
            if (name, new) not in self._wider:
                _restore(name, old)
                lines.append(f"left {name} changed from {old} to {new}; it has been put back")
        return tuple(lines)


def _restore(name: str, value: Any) -> None:
    if name == CWD:
        # It may have been removed: the next look at it says so.
        with contextlib.suppress(OSError):
            os.chdir(value)
        return
    torch: Any = sys.modules["torch"]
    if name == DTYPE:
        torch.set_default_dtype(value)
    elif name == DEVICE:
        # None is how torch starts: the CPU, without a mode that every call goes through.
        torch.set_default_device(None if value == "cpu" else value)
    elif name == DETERMINISTIC:
        torch.set_deterministic_debug_mode(value)
    elif name == CUDNN_DETERMINISTIC:
        torch.backends.cudnn.deterministic = value
    else:
        torch.backends.cudnn.benchmark = value
