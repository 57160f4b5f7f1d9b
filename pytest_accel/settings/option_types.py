"""Functions that convert text, or an ini value that pytest has converted, to the value of a setting.

Each function raises ``ValueError`` for a value that is not allowed. Imported when a session has the first setting.
"""

from __future__ import annotations

import re
from typing import Literal

from pytest_accel.core import marks
from pytest_accel.core.device import Share
from pytest_accel.core.kinds import check_kind, kinds
from pytest_accel.core.marks import one_of
from pytest_accel.core.units import parse_memory, parse_time
from pytest_accel.settings.select_expression import parse

UNFORKABLE = {
    **dict.fromkeys(("jax", "jaxlib", "tensorflow"), "its runtime has threads, which do not survive a fork"),
    "cupy": "its CUDA runtime does not survive a fork",
    "paddle": "its import starts a device runtime, which does not survive a fork",
}
"""Packages that the fork server never imports, each with the reason. Whether an import starts the runtime depends on
the release and the machine, and the fork server only sees threads and the runtimes that torch has started."""
_MOST_PLANNED = 256
"""Maximum number of devices of ``--accel-plan``."""
_MOST_RESOURCES = 512
"""Maximum number of a named resource. Each is a lock file, open while a test has it; a process may open 1,024 files."""
_RESOURCE = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)


def _check(is_allowed: bool, value: object) -> None:
    if not is_allowed:
        raise ValueError(value)


def text(value: object) -> str:
    """Return `value` without surrounding whitespace; it must not be empty."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise ValueError(value)


def order(value: object) -> str:
    """Return the text of an order of devices."""
    from pytest_accel.hardware.device_order import WORDS

    return given if (given := text(value)) in WORDS else device_names(given)


def device_names(value: object) -> str:
    """Return a text of indices or ids of devices with commas between them."""
    from pytest_accel.hardware.device_order import parse_names

    parse_names(given := text(value))
    return given


def boolean(value: object) -> bool:
    """Return True for on, and False for off, in any case; pytest's other words for them count, too."""
    if isinstance(value, bool):
        return value
    word = text(value).lower()
    _check(word in ("1", "true", "yes", "on", "0", "false", "no", "off"), value)
    return word in ("1", "true", "yes", "on")


busy = one_of("ignore", "skip", "wait")
leaks = one_of("warn", "fail", "off")
schedule = one_of("on", "off", "always")
launcher = one_of("on", "off")
mark_owner = one_of("own", "project")
time = parse_time
positive_time = marks.positive_time


def rank(value: str | int, least: int = 0) -> int:
    """Return an int that is at least `least`."""
    number = int(value)
    _check(number >= least, value)
    return number


def share(value: object) -> str:
    """Return the text of a share: a fraction such as ``0.25``, or a size such as ``8GiB``."""
    parse_share(given := text(value))
    return given


def parse_share(given: str) -> Share:
    """Return the share in the text `given`."""
    try:
        fraction = float(given)
    except ValueError:
        return marks.share(given)
    return marks.share(fraction)


def planned_machine(value: str) -> tuple[str, int]:
    """Return kind and number of ``KIND:N`` with N up to `_MOST_PLANNED`."""
    ((kind, number),) = require(value)
    _check(number <= _MOST_PLANNED, value)
    return kind, number


def require(value: object) -> tuple[tuple[str, int], ...]:
    """Return pairs of kind and number from text such as ``cuda:4, cpu:2``."""
    needs: dict[str, int] = {}
    for part in text(value).split(","):
        kind, _, number = (word.strip() for word in part.partition(":"))
        check_kind(kind)
        _check(kind not in needs, value)
        needs[kind] = rank(number, 1)
    return tuple(needs.items())


def resources(value: str) -> tuple[tuple[str, int], ...]:
    """Return pairs of a name and a number from text such as ``license: 2, memory: 64GiB, cores: auto``.

    The number of ``memory`` is in bytes. With ``auto``, ``memory`` and ``cores`` are what this process may use.
    """
    from pytest_accel.hardware.kernel_files import cpu_slots, usable_memory
    from pytest_accel.hardware.vendors.named import SMALLEST_MEMORY

    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, re.split(r"[,\n]", text(value)))):
        name, _, given = (word.strip() for word in part.partition(":"))
        is_name = _RESOURCE.fullmatch(name) is not None and name not in ("auto", "none", *kinds())
        _check(is_name and name not in found, value)
        if name == "memory":
            found[name] = max(usable_memory(), SMALLEST_MEMORY) if given == "auto" else parse_memory(given)
        else:
            auto = (name, given) == ("cores", "auto")
            found[name] = min(cpu_slots(), _MOST_RESOURCES) if auto else rank(given, 1)
            _check(found[name] <= _MOST_RESOURCES, value)
    _check(bool(found) and found.get("memory", SMALLEST_MEMORY) >= SMALLEST_MEMORY, value)
    return tuple(found.items())


def preload(value: str | list[str]) -> tuple[str, ...] | Literal["none"]:
    """Return names of modules, which are separated by commas or spaces, or the word ``none``."""
    names = (value if isinstance(value, str) else " ".join(value)).replace(",", " ").split()
    if names == ["none"]:
        return "none"
    _check(bool(names) and "none" not in names, value)
    _check(all(part.isidentifier() for name in names for part in name.split(".")), value)
    _check(not any(name.partition(".")[0] in UNFORKABLE for name in names), value)
    return tuple(dict.fromkeys(names))


def rank_plugins(value: str | list[str]) -> tuple[tuple[str, bool], ...]:
    """Return pairs of a plugin's name and True for ``+name``, False for ``-name`` (ranks run without the plugin)."""
    words = value.split() if isinstance(value, str) else value
    _check(bool(words) and all(re.fullmatch(r"[-+][\w.-]+", word) for word in words), value)
    return tuple({word[1:]: word[0] == "+" for word in words}.items())


def shard(value: object) -> tuple[int, int]:
    """Return the two numbers of ``I/N``."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text(value), re.ASCII)
    number, parts = map(int, match.groups()) if match is not None else (0, 0)
    _check(1 <= number <= parts, value)
    return number, parts


def cluster(value: object) -> str:
    """Return ``ray`` or ``ray:HOST:PORT``."""
    given = text(value)
    _check(re.fullmatch(r"ray(:(\[[0-9A-Fa-f:.]+\]|[\w.-]+):[0-9]{1,5})?", given, re.ASCII) is not None, value)
    return given


def condition(value: object) -> str:
    """Return the text of a condition on what tests need."""
    parse(given := text(value))
    return given
