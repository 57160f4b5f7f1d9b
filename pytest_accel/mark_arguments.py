"""Validation of mark arguments and their conversion to a :class:`Requirement`, at collection."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import pytest

from pytest_accel.core.device import DeviceNeed, Near, Share
from pytest_accel.core.kinds import ALL_KINDS, check_kind, name_kinds
from pytest_accel.core.marks import Marks
from pytest_accel.core.requirement import RankNeed, Requirement
from pytest_accel.core.units import parse_capability, parse_memory


class MarkError(Exception):
    """Raised for a mark argument that is not allowed. The message names the mark and the argument, but not the test."""


class _Argument(NamedTuple):
    """Definition of one argument of a mark."""

    default: object
    allowed: str
    """Allowed values, for error messages."""
    read: Callable[[Any], object]
    """Converts a value to the form that the requirement holds; raises ValueError for one that is not allowed."""


def _count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(value)


def _sizes(value: object) -> int | list[int]:
    if isinstance(value, (list, tuple)) and value:
        return [_count(size) for size in value]
    return _count(value)


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(value)


def _text(value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(value)


def _one_of(words: tuple[str, ...]) -> Callable[[object], str]:
    def read(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise ValueError(value)

    return read


def _kind(value: object) -> str:
    kind = _text(value)
    check_kind(kind)
    return kind


def _seconds(value: object) -> float:
    # float() raises OverflowError for an int above the largest float.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    raise ValueError(value)


def _share(value: object) -> Share:
    if isinstance(value, str):
        return Share(bytes=parse_memory(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        return Share(fraction=float(value))
    raise ValueError(value)


def _environment(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise ValueError(value)
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(value)
        # os.environ rejects such variables.
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(value)
    return tuple(sorted(value.items()))


_NEAR: tuple[str, ...] = get_args(Near)
_VISIBLE = ("world", "rank")
_DEFAULT_SIZE = 2
_KIND = _Argument(None, f"one of {ALL_KINDS}", _kind)
_FRESH = _Argument(False, "True or False", _boolean)

# The first argument of each mark may be given by position.
_ARGUMENTS: dict[str, dict[str, _Argument]] = {
    "devices": {
        "n": _Argument(1, "an int >= 1", _count),
        "kind": _KIND,
        "memory": _Argument(None, 'a positive size such as "40GiB", a positive int of bytes', parse_memory),
        "capability": _Argument(None, 'a version such as "9.0"', parse_capability),
        "name": _Argument(None, 'a non-empty pattern such as "*H100*"', _text),
        "share": _Argument(None, 'a fraction > 0 and <= 1, a positive size such as "8GiB"', _share),
        "near": _Argument(None, f"one of {', '.join(_NEAR)}", _one_of(_NEAR)),
        "fresh": _FRESH,
    },
    "distributed": {
        "world_size": _Argument(_DEFAULT_SIZE, "an int >= 1 or a non-empty list of them", _sizes),
        "nodes": _Argument(None, "an int >= 1", _count),
        "backend": _Argument(None, "a non-empty str", _text),
        "device": _KIND,
        "devices_per_rank": _Argument(1, "an int >= 1", _count),
        "init": _Argument(True, "True or False", _boolean),
        "timeout": _Argument(None, "a finite number of seconds > 0", _seconds),
        "fresh": _FRESH,
        "visible": _Argument("world", f"one of {', '.join(_VISIBLE)}", _one_of(_VISIBLE)),
        "env": _Argument(None, "a mapping of variable names (str) to values (str)", _environment),
        "launcher": _Argument(None, '"mpirun"', _one_of(("mpirun",))),
    },
}


def _arguments(mark: pytest.Mark | None) -> dict[str, Any]:
    """Return the checked arguments in `mark`. An argument whose default is None is left out if it is given as None."""
    if mark is None:
        return {}
    table = _ARGUMENTS[mark.name]
    first = next(iter(table))
    head = f"@pytest.mark.{mark.name}"
    given = dict(mark.kwargs)
    if len(mark.args) > 1:
        shown = ", ".join(map(repr, mark.args))
        raise MarkError(f"{head}({shown}): at most one argument may be positional, {first}, got {len(mark.args)}")
    if mark.args:
        if first in given:
            raise MarkError(
                f"{head}({mark.args[0]!r}, {first}={given[first]!r}): {first} must be given once, got it twice"
            )
        given[first] = mark.args[0]
    checked: dict[str, Any] = {}
    for argument, value in given.items():
        definition = table.get(argument)
        if definition is None:
            raise MarkError(
                f"{head}({argument}={value!r}): there is no argument {argument}, allowed are {', '.join(table)}"
            )
        if value is None and definition.default is None:
            continue
        try:
            checked[argument] = definition.read(value)
        except ValueError:
            allowed = name_kinds(definition.allowed) + (" or None" if definition.default is None else "")
            raise MarkError(f"{head}({argument}={value!r}): {argument} must be {allowed}, got {value!r}") from None
    sizes = checked.get("world_size")
    if isinstance(sizes, list) and len(set(sizes)) < len(sizes):
        raise MarkError(f"{head}(world_size={sizes!r}): world_size must name each size once, got {sizes!r}")
    if (nodes := checked.get("nodes", 1)) > (fewest := min(_sizes_of(checked))):
        raise MarkError(
            f"{head}(nodes={nodes!r}): nodes must be an int >= 1 and at most world_size, which is {fewest}, "
            f"got {nodes!r}"
        )
    return checked


def _sizes_of(checked: Mapping[str, Any]) -> list[int]:
    sizes = checked.get("world_size", _DEFAULT_SIZE)
    return sizes if isinstance(sizes, list) else [sizes]


def check(mark: pytest.Mark) -> None:
    """Raise :class:`MarkError` if an argument of `mark` is not allowed."""
    _arguments(mark)


def world_sizes(mark: pytest.Mark) -> list[int] | None:
    """Return the sizes by which a ``distributed`` mark parametrizes its test, or None if it names a single size.

    Raise :class:`MarkError` if any argument of the mark is not allowed.
    """
    sizes = _arguments(mark).get("world_size")
    return sizes if isinstance(sizes, list) else None


def requirement(marks: Marks, world_size_param: int | None = None) -> Requirement | None:
    """Return the requirement of `marks`, or None if there is no mark.

    `world_size_param` is the value of the test's own parameter ``world_size``; None if it has no such parameter. Raise
    :class:`MarkError` for an argument that is not allowed, and for marks that contradict each other.
    """
    if marks.devices is None and marks.distributed is None:
        return None
    device_arguments, rank_arguments = _arguments(marks.devices), _arguments(marks.distributed)
    if marks.distributed is None:
        return Requirement(_device_need(device_arguments), None, fresh=device_arguments.get("fresh", False))

    size = _one_world_size(rank_arguments.get("world_size", _DEFAULT_SIZE), world_size_param)
    if marks.devices is not None:
        kind = _common_value(device_arguments, "kind", rank_arguments, "device")
        count = _common_value(device_arguments, "n", rank_arguments, "devices_per_rank")
        device_arguments |= {"kind": kind, "n": count or 1}
        rank_arguments |= {"device": kind, "devices_per_rank": count or 1}
    ranks = RankNeed(
        world_size=size,
        nodes=rank_arguments.get("nodes", 1),
        backend=rank_arguments.get("backend"),
        device=rank_arguments.get("device"),
        devices_per_rank=rank_arguments.get("devices_per_rank", 1),
        init=rank_arguments.get("init", True),
        visible=rank_arguments.get("visible", "world"),
        env=rank_arguments.get("env", ()),
        launcher=rank_arguments.get("launcher"),
    )
    return Requirement(
        devices=None if marks.devices is None else _device_need(device_arguments),
        ranks=ranks,
        timeout=rank_arguments.get("timeout"),
        fresh=device_arguments.get("fresh", False) or rank_arguments.get("fresh", False),
    )


def _device_need(given: Mapping[str, Any]) -> DeviceNeed:
    return DeviceNeed(
        count=given.get("n", 1),
        kind=given.get("kind"),
        memory=given.get("memory"),
        capability=given.get("capability"),
        name=given.get("name"),
        share=given.get("share"),
        near=given.get("near"),
    )


def _one_world_size(value: int | list[int], param: object) -> int:
    head = f"@pytest.mark.distributed(world_size={value!r})"
    if param is None:
        if isinstance(value, list):
            raise MarkError(
                f"{head}: a list parametrizes only on functions, classes and modules of plain pytest tests, "
                "name one world size here"
            )
        return value
    sizes = value if isinstance(value, list) else [value]
    if isinstance(param, int) and not isinstance(param, bool) and param in sizes:
        return param
    raise MarkError(
        f"{head}: the test's own parameter world_size must be {' or '.join(map(str, sizes))} as in the mark, "
        f"got {param!r}"
    )


def _common_value(
    device_arguments: Mapping[str, Any], argument: str, rank_arguments: Mapping[str, Any], same: str
) -> Any:
    """Return the value of an argument that both marks have, under different names; None if neither gives it."""
    one, other = device_arguments.get(argument), rank_arguments.get(same)
    if one is not None and other is not None and one != other:
        raise MarkError(
            f"@pytest.mark.devices({argument}={one!r}) with @pytest.mark.distributed({same}={other!r}): "
            f"{argument} and {same} both describe each rank here and must be equal, got {one!r} and {other!r}"
        )
    return other if one is None else one
