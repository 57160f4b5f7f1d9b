"""Tests of `prctl`: Linux system calls that watch processes."""

from __future__ import annotations

import os

import pytest

from pytest_accel.core import prctl


def test_a_process_cannot_be_watched_if_python_was_built_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prctl, "_pidfd_open", None)
    assert prctl.end_of(os.getpid()) is None
