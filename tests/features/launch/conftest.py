"""Fixtures for the tests of launched scripts."""

from __future__ import annotations

from tests.launcher_sessions import plain_environment, script, use_mpi

__all__ = ["plain_environment", "script", "use_mpi"]
