"""The values of settings, from text or from what pytest made of an ini value.

Each raises ``ValueError`` for what is not allowed.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable

from pytest_accel.core.kinds import check_kind


def text(value: object) -> str:
    """Text that is not empty, without spaces around it."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise ValueError(value)


def texts(value: str | list[str]) -> tuple[str, ...]:
    """Texts that are not empty; a string holds them as a shell's command line does."""
    return tuple(text(word) for word in (shlex.split(value) if isinstance(value, str) else value))


def switch(value: object) -> bool:
    """Yes or no."""
    if isinstance(value, bool):
        return value
    word = text(value).lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(value)


def one_of(*words: str) -> Callable[[object], str]:
    """Reads one of `words`."""

    def read(value: object) -> str:
        if (word := text(value)) not in words:
            raise ValueError(value)
        return word

    return read


def count(value: str | int) -> int:
    """An int >= 1."""
    number = int(value)
    if number < 1:
        raise ValueError(value)
    return number


def rank(value: str | int) -> int:
    """An int >= 0."""
    number = int(value)
    if number < 0:
        raise ValueError(value)
    return number


def wait(value: str | float) -> float:
    """A finite number of seconds >= 0."""
    seconds = float(value)
    # False for nan too.
    if not 0 <= seconds <= sys.float_info.max:
        raise ValueError(value)
    return seconds


def timeout(value: str | float) -> float:
    """A finite number of seconds > 0."""
    seconds = wait(value)
    if seconds == 0:
        raise ValueError(value)
    return seconds


def require(value: object) -> tuple[tuple[str, int], ...]:
    """Pairs of kind and number: ``cuda:4, cpu:2``."""
    needs: dict[str, int] = {}
    for part in text(value).split(","):
        kind, _, number = (word.strip() for word in part.partition(":"))
        check_kind(kind)
        if kind in needs:
            raise ValueError(value)
        needs[kind] = count(number)
    return tuple(needs.items())


def preload(value: str | list[str]) -> tuple[str, ...]:
    """Names of modules; none of them for the word ``none``."""
    names = (value if isinstance(value, str) else " ".join(value)).replace(",", " ").split()
    if names == ["none"]:
        return ()
    if not names or "none" in names or not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(value)
    return tuple(dict.fromkeys(names))


def rank_plugins(value: str | list[str]) -> tuple[tuple[str, bool], ...]:
    """Names of plugins; False for those that ranks are without (``-name``), True for ``+name``."""
    words = value.split() if isinstance(value, str) else value
    if not words or not all(re.fullmatch(r"[-+][\w.-]+", word) for word in words):
        raise ValueError(value)
    return tuple({word[1:]: word[0] == "+" for word in words}.items())
