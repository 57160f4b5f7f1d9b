"""The marks `devices` and `distributed`: their arguments, and lookup of the marks of a test.

Every session imports this module, so it imports only what every session needs anyway.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.device import Share

NEEDS = "needs"
"""Name of the mark of `features/resources`."""
ALL = "all"
"""The number of devices or ranks of a test that takes as many as the session has."""


class MarkError(Exception):
    """Raised for a mark argument that is not allowed. The message names the mark and the argument, but not the test."""

    def __init__(self, text: str, foreign: str = "") -> None:
        super().__init__(text)
        self.foreign = foreign
        """Name of the mark if the plugin's has no such arguments, so that it may be the project's own; else empty."""


class Marks(NamedTuple):
    """The marks that apply to a test: the closest mark of each name, or None."""

    devices: pytest.Mark | None = None
    distributed: pytest.Mark | None = None


# Arguments


class _Argument(NamedTuple):
    """Definition of an argument of a mark."""

    default: object
    allowed: str
    """Allowed values, for error messages."""
    read: Callable[[Any], object]
    """Converts a value to the form that the test's plan holds; raises ValueError if the value is not allowed."""


def _count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(value)


def _count_or_all(value: object) -> int | str:
    return ALL if isinstance(value, str) and value == ALL else _count(value)


def _or_list(read: Callable[[Any], Any]) -> Callable[[object], Any]:
    """Return a function that reads one value as `read` does, and a non-empty list or tuple of such values as a list."""

    def read_each(value: object) -> object:
        if isinstance(value, (list, tuple)) and value:
            return [read(one) for one in value]
        return read(value)

    return read_each


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(value)


def _text(value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(value)


def one_of(*words: str) -> Callable[[object], str]:
    """Return a function that accepts only `words`."""

    def read(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise ValueError(value)

    return read


def _kind(value: object) -> str:
    kind = _text(value)
    from pytest_accel.core.kinds import check_kind  # Imported here, because not every session needs it.

    check_kind(kind)
    return kind


def positive_time(value: object) -> float:
    """Return the seconds, > 0, of a number or of a text such as ``90s``."""
    from pytest_accel.core.units import parse_time

    if (seconds := parse_time(value)) == 0:
        raise ValueError(value)
    return seconds


def _memory(value: object) -> int:
    from pytest_accel.core.units import parse_memory

    return parse_memory(value)


def _capability(value: object) -> tuple[int, ...]:
    from pytest_accel.core.units import parse_capability

    return parse_capability(value)


def share(value: object) -> Share:
    """Return the share that is given as a fraction or as a size such as ``8GiB``."""
    from pytest_accel.core.device import Share

    if isinstance(value, str):
        return Share(bytes=_memory(value))
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


_KIND = _Argument(None, "one of {kinds}", _kind)
_FRESH = _Argument(False, "True or False", _boolean)
_AT_LEAST = _Argument(1, "an int >= 1", _count)

# The first argument of each mark may be given by position.
_ARGUMENTS: dict[str, dict[str, _Argument]] = {
    "devices": {
        "n": _Argument(1, 'an int >= 1 or "all"', _count_or_all),
        "at_least": _AT_LEAST,
        "kind": _KIND,
        "memory": _Argument(None, 'a positive size such as "40GiB", a positive int of bytes', _memory),
        "capability": _Argument(None, 'a version such as "9.0"', _capability),
        "name": _Argument(None, 'a non-empty pattern such as "*H100*"', _text),
        "share": _Argument(None, 'a fraction > 0 and <= 1, a positive size such as "8GiB"', share),
        "near": _Argument(None, "one of nvlink, numa, pcie", one_of("nvlink", "numa", "pcie")),
        "fresh": _FRESH,
    },
    "distributed": {
        "world_size": _Argument(2, 'an int >= 1, "all" or a non-empty list of them', _or_list(_count_or_all)),
        "at_least": _AT_LEAST,
        "nodes": _Argument(None, "an int >= 1", _count),
        "backend": _Argument(None, "a non-empty str, a non-empty list of them", _or_list(_text)),
        "kind": _KIND,
        "devices_per_rank": _Argument(1, "an int >= 1", _count),
        "init": _Argument(True, "True or False", _boolean),
        "timeout": _Argument(None, 'a time > 0 such as 300 (seconds), "90s", "5min" or "1.5h"', positive_time),
        "fresh": _FRESH,
        "visible": _Argument("world", "one of world, rank", one_of("world", "rank")),
        "env": _Argument(None, "a mapping of variable names (str) to values (str)", _environment),
        "launcher": _Argument(None, '"mpirun"', one_of("mpirun")),
    },
}
"""The arguments of each mark, in the order of its signature.

A test's plan (`driver/item_plan.py`) interprets some of them, such as ``timeout`` and ``nodes``. The others become
fields with the same names: of `DeviceNeed` for ``devices``, and of `WorldKey` for ``distributed``.
"""

_EFFECTS = {
    "devices": "run the test in one process that sees exactly n devices, all of which fit the filters.",
    "distributed": "run the whole test in every one of world_size ranks; a list runs it once for each entry.",
}


def _signature(name: str) -> str:
    first, *others = (f"{argument}={definition.default!r}" for argument, definition in _ARGUMENTS[name].items())
    return f"{name}({', '.join([first, '*', *others])})"


MARKER_LINES = tuple(f"{_signature(name)}: {effect}" for name, effect in _EFFECTS.items())
"""Lines that ``pytest --markers`` shows, for ``config.addinivalue_line("markers", ...)``."""
_DESELECTED = re.compile(r"\bnot\s+(devices|distributed)\b(?!\s*\()")
_MENTIONED = re.compile(r"\bmark\s*\.\s*(distributed|devices)\b")


def marks_in(text: str) -> set[str]:
    """Return the plugin's marks that the `text` of a test file mentions: a guess before the file is imported."""
    return set(_MENTIONED.findall(text))


def deselected_marks(expression: str) -> set[str]:
    """Return the plugin's marks whose tests the `expression` of ``-m`` seems to deselect."""
    return set(_DESELECTED.findall(expression))


def check(mark: pytest.Mark, resources: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments that `mark` gives; leave out a None that is the default.

    `resources` are names that count as kinds, too. Raise :class:`MarkError` if an argument is not allowed.
    """
    table = _ARGUMENTS[mark.name]
    first = next(iter(table))
    head = f"@pytest.mark.{mark.name}"
    given = dict(mark.kwargs)
    if len(mark.args) > 1 or (mark.args and first in given):
        text = f"@pytest.mark.{mark_text(mark)}: at most one argument may be positional, {first}, and given once"
        raise MarkError(text, foreign=mark.name)
    if mark.args:
        given[first] = mark.args[0]
    checked: dict[str, Any] = {}
    for argument, value in given.items():
        definition = table.get(argument)
        if definition is None:
            from difflib import get_close_matches

            close = get_close_matches(argument, table, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            text = (
                f"{head}({argument}={value!r}): there is no argument {argument}{hint}, allowed are {', '.join(table)}"
            )
            raise MarkError(text, foreign=mark.name)
        if value is None and definition.default is None:
            continue
        try:
            is_resource = argument == "kind" and value in resources
            checked[argument] = value if is_resource else definition.read(value)
        except ValueError:
            from pytest_accel.core.kinds import name_kinds

            allowed = name_kinds(definition.allowed) + (" or None" if definition.default is None else "")
            if argument == "kind" and resources:
                allowed += f"; or a name of accel_resources: {', '.join(resources)}"
            text = f"{head}({argument}={value!r}): {argument} must be {allowed}, got {value!r}"
            raise MarkError(text, foreign=mark.name) from None
    for argument, what in (("world_size", "size"), ("backend", "backend")):
        listed = checked.get(argument)
        if isinstance(listed, list) and len(set(listed)) < len(listed):
            raise MarkError(f"{head}({argument}={listed!r}): {argument} must name each {what} once, got {listed!r}")
    counts = _as_list(checked.get(first, table[first].default))
    if "at_least" in checked and ALL not in counts:
        number = checked.get(first, table[first].default)
        raise MarkError(f"{head}(at_least={checked['at_least']}): at_least is for {first}={ALL!r}, got {number!r}")
    fewest = min((count for count in counts if count != ALL), default=math.inf)
    if (nodes := checked.get("nodes", 1)) > fewest:
        raise MarkError(
            f"{head}(nodes={nodes!r}): nodes must be an int >= 1 and at most world_size, which is {fewest}, "
            f"got {nodes!r}"
        )
    return checked


def as_keywords(mark: pytest.Mark) -> pytest.Mark:
    """Return `mark` with its first argument given by name, if it is one of the plugin's and has only this argument."""
    first = next(iter(_ARGUMENTS.get(mark.name, ())), None)
    if first is None or len(mark.args) != 1 or first in mark.kwargs:
        return mark
    named: pytest.Mark = getattr(pytest.mark, mark.name)(**{first: mark.args[0]}, **mark.kwargs).mark
    return named


def mark_text(mark: pytest.Mark) -> str:
    """Return `mark` as a rule has it: ``devices(1, share=0.25)``."""
    arguments = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    return f"{mark.name}({', '.join(arguments)})"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def has_list(mark: pytest.Mark | None) -> bool:
    """Return whether an argument of `mark` is a list. A test is made for each of its entries."""
    return mark is not None and any(isinstance(value, list | tuple) for value in (*mark.args, *mark.kwargs.values()))


def read(
    marks: Marks, resources: Collection[str] = (), *, world_size: object = None, backend: object = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the given arguments of ``devices`` and of ``distributed``; nothing for a mark that the test lacks.

    ``distributed`` always has one `world_size`, and at most one `backend`. They come from lists, or from the
    test's own parameter `world_size`, which may be anything. If the test has both marks, both have the kind and number
    of each rank's devices, if either gives it. `resources` are names that ``devices`` may give as kind, too. Raise
    :class:`MarkError` for an argument that is not allowed, and for marks that contradict each other.
    """
    devices = {} if marks.devices is None else check(marks.devices, resources)
    ranks = {} if marks.distributed is None else check(marks.distributed)
    if marks.distributed is not None:
        default = _ARGUMENTS["distributed"]["world_size"].default
        ranks["world_size"] = _chosen("world_size", ranks.get("world_size", default), world_size)
        if "backend" in ranks:
            ranks["backend"] = _chosen("backend", ranks["backend"], backend)
        if marks.devices is not None:
            if devices.get("n") == ALL:
                raise MarkError(
                    "@pytest.mark.devices(n='all') with @pytest.mark.distributed: n must be an int here, since it is "
                    "the number of devices of each rank; distributed('all') makes as many ranks as there are devices"
                )
            for argument, same in (("kind", "kind"), ("n", "devices_per_rank")):
                value = _common_value(devices, argument, ranks, same)
                if value is not None:
                    devices[argument] = ranks[same] = value
    return devices, ranks


def _chosen(argument: str, value: Any, choice: object) -> Any:
    """Return the value of an argument of ``distributed`` that applies to a test: `choice`, if there is a list."""
    allowed = _as_list(value)
    if choice is None and not isinstance(value, list):
        return value
    head = f"@pytest.mark.distributed({argument}={value!r})"
    if choice is None:
        raise MarkError(
            f"{head}: no test was made for each entry of the list, since the mark was added too late, or this "
            f"installation of pytest-accel lacks the feature; name one {argument}"
        )
    if isinstance(choice, (int, str)) and not isinstance(choice, bool) and choice in allowed:
        return choice
    advice = "; rename the test's parameter world_size if it has another meaning" if argument == "world_size" else ""
    raise MarkError(
        f"{head}: the {argument} with which the test was collected must be {' or '.join(map(str, allowed))} as in the "
        f"mark, got {choice!r}{advice}"
    )


def _common_value(
    device_arguments: Mapping[str, Any], argument: str, rank_arguments: Mapping[str, Any], same: str
) -> object:
    """Return the value of an argument that both marks have, perhaps under two names; None if neither gives it."""
    one, other = device_arguments.get(argument), rank_arguments.get(same)
    if one is not None and other is not None and one != other:
        names = argument if argument == same else f"{argument} and {same}"
        raise MarkError(
            f"@pytest.mark.devices({argument}={one!r}) with @pytest.mark.distributed({same}={other!r}): "
            f"{names} must be equal, since both marks describe each rank here, got {one!r} and {other!r}"
        )
    return other if one is None else one


# Owners


class MarkOwners:
    """Decides which marks named `devices` and `distributed` are the plugin's, and which are the project's own.

    Each pytest process has an instance on its config. The owner of a name is decided in this order:

    1. ``accel_marks`` names the owner of both. In a rank, its driver does.
    2. A name that nobody else has registered is the plugin's.
    3. Any other name is the project's. A test that needs such a mark for a fixture of the plugin fails, and names
       ``accel_marks``.

    The marks of the plugin's rules are its own in any case.
    """

    def __init__(self, lines: Callable[[], Sequence[str]], owner: Literal["own", "project"] | None = None) -> None:
        """`lines` returns the value of the ini setting ``markers``; `owner` is that of ``accel_marks``."""
        self._lines = lines
        self._decided = None if owner is None else frozenset(_ARGUMENTS if owner == "project" else ())
        """The names of the project's own marks, if they do not depend on their registration."""
        self._given: dict[int, pytest.Mark] = {}
        """The marks of rules by their `id`. An equal mark of the suite is another object."""

    @property
    def of_project(self) -> frozenset[str]:
        """The names of the project's own marks, as far as is known now."""
        # Not once for all: conftests and plugins may register more.
        return _registered_by_others(tuple(self._lines())) if self._decided is None else self._decided

    def is_ours(self, mark: pytest.Mark) -> bool:
        """Return whether `mark` is one of the plugin's."""
        return mark.name in _ARGUMENTS and (id(mark) in self._given or mark.name not in self.of_project)

    def give(self, mark: pytest.Mark) -> None:
        """Record that the plugin gives `mark` to tests."""
        self._given[id(mark)] = mark

    def decide(self, of_project: Iterable[str]) -> None:
        """Take over the decision of a driver: the names of the project's own marks."""
        self._decided = frozenset(of_project)


@lru_cache(maxsize=4)
def _registered_by_others(lines: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the plugin's marks that others have registered, too.

    Each line has a name, optional arguments, a colon and a text. A line that begins with the signature of the plugin's
    mark is a copy of the plugin's own.
    """
    own = tuple(line.partition(", *")[0] + ", *" for line in MARKER_LINES)
    return registered(line for line in lines if not line.strip().startswith(own)) & _ARGUMENTS.keys()


def registered(lines: Iterable[str]) -> frozenset[str]:
    """Return the names of the marks that `lines` of the ini setting ``markers`` register."""
    return frozenset(re.split(r"[:(]", line, maxsplit=1)[0].strip() for line in lines)


# Lookup


def closest_marks(item: pytest.Item, owners: MarkOwners | None = None) -> Marks:
    """Return the closest marks of `item` that are the plugin's, as `owners` decides.

    Without `owners`, all marks with the names of the plugin's marks count.

    A parameter is closer than its function, and a class is closer than its bases. (pytest's own ``get_closest_marker``
    orders both pairs the other way round.) If a function has several marks of one name, the first counts, as everywhere
    in pytest: the lowest decorator, then marks that a hook adds with ``item.add_marker``. A hook can put its mark first
    with ``append=False``.

    This is called several times for each test, also in sessions without marks: a call takes about a microsecond.
    """
    devices = distributed = None
    node: Any = item
    while node is not None:
        for mark in _own_marks(node) if node.own_markers else ():
            if mark.name not in _ARGUMENTS or (owners is not None and not owners.is_ours(mark)):
                continue
            if mark.name == "devices":
                devices = devices or mark
            else:
                distributed = distributed or mark
        node = node.parent
    return Marks(devices, distributed)


def _own_marks(node: Any) -> Iterable[pytest.Mark]:
    """Return the marks of `node` itself, the closest first."""
    if isinstance(node, pytest.Class):
        return reversed(node.own_markers)  # The marks of its bases come before its own.
    # Only parametrized functions have a callspec. own_markers holds its marks too, but after the function's.
    callspec = getattr(node, "callspec", None)
    return node.own_markers if callspec is None else (*callspec.marks, *node.own_markers)


def own_world_size(item: pytest.Item) -> object:
    """Return the value of a parameter ``world_size`` of the test itself; None if it has no such parameter."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("world_size")
