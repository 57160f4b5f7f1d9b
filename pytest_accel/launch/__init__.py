"""Launchers of many processes: scripts under one, on the devices of a test, and pytest itself under one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_accel.launch.launch_result import LaunchError, LaunchResult, LaunchTimeout, NoOutput

__all__ = ["LaunchError", "LaunchResult", "LaunchTimeout", "NoOutput"]


def __getattr__(name: str) -> Any:
    # Sessions import this package for the fixture's sake, most of them without using it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_accel.launch import launch_result

    return getattr(launch_result, name)
