"""The failure of a test that uses a fixture of this package without the marks that the fixture needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.world_key import WorldKey

_OF_RANKS = frozenset(
    (
        *("rank", "local_rank", "node_rank", "world_size", "process_group", "device_mesh"),
        *("dist_store", "world_store", "gather", "free_port", "shared_tmp_path"),
    )
)
"""Fixtures that have a value only in the ranks of a distributed test."""
_OF_DEFAULT_GROUP = frozenset(("process_group", "device_mesh"))
_OF_OTHER_RANKS = frozenset(("dist_store", "world_store", "gather", "faults"))
"""Fixtures that need the processes of the other ranks. A fake process group has none."""
_TEXT = "accel_missing_mark"
"""Attribute of the exception with its text without a place."""


def missing_mark(fixture: str, key: WorldKey | None) -> BaseException | None:
    """Return the exception to raise for a test that uses `fixture`; None if the test's marks suffice.

    `key` is the key of the world in which the test runs; None if the test has no mark of this package.
    """
    needed = f"the fixture {fixture!r} needs"
    distributed = f"{needed} @pytest.mark.distributed on the test"
    if key is None:
        text = distributed
        if fixture not in _OF_RANKS:
            text = f"{needed} @pytest.mark.devices or @pytest.mark.distributed on the test"
    elif fixture in _OF_RANKS and not key.grouped:
        text = f"{distributed}; @pytest.mark.devices alone makes no ranks"
    elif fixture in _OF_DEFAULT_GROUP and not key.init:
        text = f"{needed} a process group, which @pytest.mark.distributed(init=False) leaves to the test"
    elif fixture in _OF_OTHER_RANKS and key.fake_size is not None:
        text = f'{needed} the other ranks, and @pytest.mark.distributed(backend="fake") runs one process'
    else:
        return None
    error: BaseException = pytest.fail.Exception(text, pytrace=False)
    vars(error)[_TEXT] = text
    return error


def name_place(error: BaseException, item: pytest.Item, about_marks: str | None = None) -> None:
    """Add `about_marks`, and the file and line of `item`, to `error` if it is one of :func:`missing_mark`.

    The fixture cannot do so: pytest raises the exception of a session's fixture again in each test that uses it.
    """
    if isinstance(error, pytest.fail.Exception) and (text := vars(error).get(_TEXT)) is not None:
        path, line, _ = item.location
        text = text if about_marks is None else f"{text}; {about_marks}"
        error.msg = f"{text} ({path}{'' if line is None else f':{line + 1}'})"
