"""Fixtures of the tests that need a GPU.

Nearly all of these tests lease a GPU and run in a rank; without a GPU they are skipped and counted. Some tests start
sessions on their GPU. These sessions have a separate lock folder, since the test already holds the lock of the GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.background_suite import suite

if TYPE_CHECKING:
    from pytest_accel.core.device import Device
    from pytest_accel.fixtures import Accel

__all__ = ["suite"]

_TIMEOUT = 240.0
"""Seconds after which a session counts as hung; shorter than the timeout of a test."""
_FIRST = "test_gpu_suites.py"
"""The file whose tests run first: a run that has to end early should have shown the most."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the first file in front."""
    items.sort(key=lambda item: item.path.name != _FIRST)


class Inner:
    """A suite in a folder, whose sessions see the GPU of the test that runs them."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.path = pytester.path
        self._pytester = pytester

    def write(self, **files: str) -> None:
        """Write a module for each name."""
        self._pytester.makepyfile(**files)

    def run(self, *arguments: str) -> pytest.RunResult:
        """Run a session and return its result."""
        options = ("-v", "-p", "no:randomly", "-p", "no:asyncio", "-p", "no:cacheprovider")
        return self._pytester.runpytest_subprocess(*options, *arguments, timeout=_TIMEOUT)


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Inner:
    """Return an empty suite, whose sessions have their own locks and none of this session's variables for pytest."""
    for name in os.environ:
        if name.startswith("PYTEST_") and name != "PYTEST_DEBUG_TEMPROOT":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("COLUMNS", "200")
    return Inner(pytester)


@pytest.fixture
def card(accel: Accel) -> Device:
    """Return the leased GPU; skip the test if it is a MIG instance."""
    (device,) = accel.devices
    if device.parent is not None:
        pytest.skip(f"{device.id} is a MIG instance")
    return device
