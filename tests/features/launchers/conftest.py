"""Fixtures for the tests of sessions under launchers."""

from __future__ import annotations

from tests.launcher_sessions import plain_environment, suite, use_mpi

__all__ = ["plain_environment", "suite", "use_mpi"]
