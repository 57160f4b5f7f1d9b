"""Fixtures for the tests of launched scripts."""

from __future__ import annotations

from tests.features.launchers.conftest import plain_environment, script, use_mpi

__all__ = ["plain_environment", "script", "use_mpi"]
