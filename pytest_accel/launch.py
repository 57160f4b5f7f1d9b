"""Errors and results of the `launch` fixture. They are also names of `pytest_accel` itself."""

from __future__ import annotations

from pytest_accel import LaunchError, LaunchResult, LaunchTimeout

__all__ = ["LaunchError", "LaunchResult", "LaunchTimeout"]
