"""The `launch` fixture: it runs a script under a launcher, such as torchrun, on the devices of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_accel.launch.launch_result import LaunchError, LaunchResult, LaunchTimeout, NoOutput

__all__ = ["LaunchError", "LaunchResult", "LaunchTimeout", "NoOutput"]


def __getattr__(name: str) -> Any:
    # Lazy import: every session imports this package for the fixture, and few use it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_accel.launch import launch_result

    return getattr(launch_result, name)
