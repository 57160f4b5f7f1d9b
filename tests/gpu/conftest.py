"""Tests here have a GPU of their own and run in its rank; where there is none, they skip and are counted.

Some start sessions of their own on that GPU, which therefore need no lock of the machine's: the test has it already.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.device import Device
    from pytest_accel.fixtures import Accel

_TIMEOUT = 240.0
"""Seconds after which a session counts as hung; less than a phase of a test may take."""


class Inner:
    """A folder with tests, and sessions in it that see this test's GPU."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.path = pytester.path
        self._pytester = pytester

    def write(self, **files: str) -> None:
        """A module for each name."""
        self._pytester.makepyfile(**files)

    def run(self, *arguments: str) -> pytest.RunResult:
        """Run a session to its end."""
        options = ("-v", "-p", "no:randomly", "-p", "no:asyncio", "-p", "no:cacheprovider")
        return self._pytester.runpytest_subprocess(*options, *arguments, timeout=_TIMEOUT)


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Inner:
    """Sessions that know of this one only what any process on its GPU knows."""
    for name in os.environ:
        if name.startswith("PYTEST_") and name != "PYTEST_DEBUG_TEMPROOT":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("COLUMNS", "200")
    return Inner(pytester)


@pytest.fixture
def card(accel: Accel) -> Device:
    """The leased GPU, for tests that speak of whole ones."""
    (device,) = accel.devices
    if device.parent is not None:
        pytest.skip(f"{device.id} is a MIG instance")
    return device
