"""Adds a prefix to the keys of bridges, so that they differ from those of conftests and plugins in the same hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from pytest_accel.rank.rank_data import OWN_PREFIX, OwnData

Bridge = TypeVar("Bridge")


def with_own_keys(bridge: Bridge) -> Bridge:
    """Wrap the hooks of `bridge` so that its keys are sent with the project's prefix, and return it.

    The hooks themselves see keys without the prefix. Call this before `bridge` is registered with pytest.
    """
    hooks: Any = bridge
    if hasattr(hooks, "pytest_accel_rank_data"):
        hooks.pytest_accel_rank_data = _adds_prefix(hooks.pytest_accel_rank_data)
    if hasattr(hooks, "pytest_accel_merge"):
        hooks.pytest_accel_merge = _removes_prefix(hooks.pytest_accel_merge)
    return bridge


def _adds_prefix(send: Callable[..., dict[str, Any] | None]) -> Callable[..., OwnData | None]:
    @wraps(send)  # pytest passes the arguments that the wrapped function names.
    def sent(*args: Any) -> OwnData | None:
        data = send(*args)
        return None if data is None else OwnData({f"{OWN_PREFIX}{key}": value for key, value in data.items()})

    return sent


def _removes_prefix(merge: Callable[..., None]) -> Callable[..., None]:
    place = list(signature(merge).parameters).index("rank_data")

    @wraps(merge)
    def merged(*args: Any) -> None:
        own = {rank: _own(data) for rank, data in args[place].items()}
        merge(*args[:place], own, *args[place + 1 :])

    return merged


def _own(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(OWN_PREFIX): value for key, value in data.items() if key.startswith(OWN_PREFIX)}
