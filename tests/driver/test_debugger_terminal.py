"""Tests of lending the driver's terminal to a rank's debugger."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_accel.driver.debugger_terminal import lend_terminal


class FakeConfig:
    """A fake configuration; `calls` has the calls of its capture manager, if it has one, and of its hooks."""

    def __init__(self, *, captures: bool, broken: str = "") -> None:
        """The call of `broken` raises KeyError."""
        self._broken = broken
        self.calls: list[str] = []
        capture = SimpleNamespace(suspend=self._note("suspend"), resume=self._note("resume")) if captures else None
        self.pluginmanager = SimpleNamespace(getplugin={"capturemanager": capture}.__getitem__)
        self.hook = SimpleNamespace(pytest_enter_pdb=self._note("enter"), pytest_leave_pdb=self._note("leave"))

    def _note(self, name: str) -> Any:
        def call(**arguments: object) -> None:
            self.calls.append(name)
            if name == self._broken:
                raise KeyError(name)

        return call


def test_the_terminal_is_lent_without_a_capture_manager() -> None:
    config = FakeConfig(captures=False)
    before = signal.getsignal(signal.SIGINT)
    with lend_terminal(cast(pytest.Config, config), os.getpid()) as descriptors:
        assert descriptors == (0, 1)
        assert signal.getsignal(signal.SIGINT) is not before
    assert config.calls == ["enter", "leave"]
    assert signal.getsignal(signal.SIGINT) is before


def test_capturing_goes_on_if_a_hook_raises() -> None:
    config = FakeConfig(captures=True, broken="enter")
    with pytest.raises(KeyError, match="enter"), lend_terminal(cast(pytest.Config, config), os.getpid()):
        pass
    assert config.calls == ["suspend", "enter", "leave", "resume"]
