"""Errors and results of the `launch` fixture. They are also names of `pytest_accel` itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_accel.features.launch.launch_result import LaunchError, LaunchResult, LaunchTimeout, NoOutput

__all__ = ["LaunchError", "LaunchResult", "LaunchTimeout", "NoOutput"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_accel.features.launch import launch_result

    return getattr(launch_result, name)
