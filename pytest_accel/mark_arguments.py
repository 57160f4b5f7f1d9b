"""The arguments of marks to a :class:`Requirement`: pure data, known at collection."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import pytest

from pytest_accel.core.device import DeviceNeed, Near, Share
from pytest_accel.core.kinds import ALL_KINDS, check_kind, name_kinds
from pytest_accel.core.requirement import RankNeed, Requirement
from pytest_accel.core.units import parse_capability, parse_memory
from pytest_accel.marks import Marks


class MarkError(Exception):
    """A mark with an argument that is not allowed; the message names all but the test."""


class _Argument(NamedTuple):
    default: object
    allowed: str
    read: Callable[[Any], object]
    """The value as the requirement holds it; ValueError for one that is not allowed."""


def _count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(value)


def _sizes(value: object) -> int | list[int]:
    if isinstance(value, (list, tuple)) and value:
        return [_count(size) for size in value]
    return _count(value)


def _switch(value: object) -> bool:
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
    # Bounded by the largest float, because an int beyond it has no float.
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
        # What os.environ itself cannot take.
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(value)
    return tuple(sorted(value.items()))


_NEAR: tuple[str, ...] = get_args(Near)
_VISIBLE = ("world", "rank")
_DEFAULT_SIZE = 2
_KIND = _Argument(None, f"one of {ALL_KINDS}", _kind)
_FRESH = _Argument(False, "True or False", _switch)

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
        "init": _Argument(True, "True or False", _switch),
        "timeout": _Argument(None, "a finite number of seconds > 0", _seconds),
        "fresh": _FRESH,
        "visible": _Argument("world", f"one of {', '.join(_VISIBLE)}", _one_of(_VISIBLE)),
        "env": _Argument(None, "a mapping of variable names (str) to values (str)", _environment),
        "launcher": _Argument(None, '"mpirun"', _one_of(("mpirun",))),
    },
}


def _arguments(mark: pytest.Mark | None) -> dict[str, Any]:
    """The checked arguments that `mark` gives; one given as its default of None counts as not given."""
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
        about = table.get(argument)
        if about is None:
            raise MarkError(
                f"{head}({argument}={value!r}): there is no argument {argument}, allowed are {', '.join(table)}"
            )
        if value is None and about.default is None:
            continue
        try:
            checked[argument] = about.read(value)
        except ValueError:
            allowed = name_kinds(about.allowed) + (" or None" if about.default is None else "")
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
    """Raises :class:`MarkError` for an argument of `mark` that is not allowed."""
    _arguments(mark)


def world_sizes(mark: pytest.Mark) -> list[int] | None:
    """The sizes over which a ``distributed`` mark parametrizes its test, or None for one that names a single size.

    Raises :class:`MarkError` for any argument of the mark that is not allowed.
    """
    sizes = _arguments(mark).get("world_size")
    return sizes if isinstance(sizes, list) else None


def requirement(marks: Marks, world_size_param: int | None = None) -> Requirement | None:
    """What `marks` ask for, or None where there is no mark.

    `world_size_param` is the test's own parameter of the name ``world_size``, None where it has none. Raises
    :class:`MarkError` for an argument that is not allowed, and for marks that contradict each other.
    """
    if marks.devices is None and marks.distributed is None:
        return None
    of_devices, of_ranks = _arguments(marks.devices), _arguments(marks.distributed)
    if marks.distributed is None:
        return Requirement(_device_need(of_devices), None, fresh=of_devices.get("fresh", False))

    size = _one_world_size(of_ranks.get("world_size", _DEFAULT_SIZE), world_size_param)
    if marks.devices is not None:
        kind = _agreed(of_devices, "kind", of_ranks, "device")
        count = _agreed(of_devices, "n", of_ranks, "devices_per_rank")
        of_devices |= {"kind": kind, "n": count or 1}
        of_ranks |= {"device": kind, "devices_per_rank": count or 1}
    ranks = RankNeed(
        world_size=size,
        nodes=of_ranks.get("nodes", 1),
        backend=of_ranks.get("backend"),
        device=of_ranks.get("device"),
        devices_per_rank=of_ranks.get("devices_per_rank", 1),
        init=of_ranks.get("init", True),
        visible=of_ranks.get("visible", "world"),
        env=of_ranks.get("env", ()),
        launcher=of_ranks.get("launcher"),
    )
    return Requirement(
        devices=None if marks.devices is None else _device_need(of_devices),
        ranks=ranks,
        timeout=of_ranks.get("timeout"),
        fresh=of_devices.get("fresh", False) or of_ranks.get("fresh", False),
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


def _agreed(of_devices: Mapping[str, Any], argument: str, of_ranks: Mapping[str, Any], same: str) -> Any:
    """The value of an argument that both marks have under a name of their own; None where neither gives it."""
    one, other = of_devices.get(argument), of_ranks.get(same)
    if one is not None and other is not None and one != other:
        raise MarkError(
            f"@pytest.mark.devices({argument}={one!r}) with @pytest.mark.distributed({same}={other!r}): "
            f"{argument} and {same} both describe each rank here and must be equal, got {one!r} and {other!r}"
        )
    return other if one is None else one
