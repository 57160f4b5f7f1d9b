"""Fixtures for the tests of Ray clusters."""

from __future__ import annotations

from tests.launcher_sessions import suite

__all__ = ["suite"]
