"""inline-snapshot: ranks only compare. A session that would change snapshots is refused if it has marked tests.

When the session ends, inline-snapshot changes the source of tests according to the values in its own process. The
driver's process does not have the values of marked tests, and would remove snapshots that only ranks use.
"""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pytest_accel.core.shims import base_temporary_directory
from pytest_accel.features.plugins.rows import named
from pytest_accel.rank.context import RANK

_VARIABLE = "INLINE_SNAPSHOT_DEFAULT_FLAGS"


def in_rank(config: pytest.Config) -> None:
    """Have inline-snapshot compare in this rank, and keep its temporary folder where this rank's folders are."""
    state = _state()
    state.update_flags = named("inline_snapshot._flags", "Flags")()
    if config.stash[RANK].session.distributed:
        state.active = False  # As in xdist workers: missing and wrong values are not counted.
    if state.tmp_dir is not None:
        state.tmp_dir.cleanup()
        state.tmp_dir = TemporaryDirectory(prefix="inline-snapshot-", dir=base_temporary_directory(config))


def in_driver(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` if the user has asked for snapshots to be changed.

    The default flags at a terminal are not a request of the user. They are replaced by `report`, the default elsewhere.
    """
    state = _state()
    if not (state.active and set(state.update_flags)):
        return
    if given := config.getoption("inline_snapshot"):
        source = f"--inline-snapshot={given}"
    elif _VARIABLE in os.environ:
        source = f"{_VARIABLE}={os.environ[_VARIABLE]}"
    elif state.flags == {"create", "review"}:
        state.flags, state.update_flags = {"report"}, named("inline_snapshot._flags", "Flags")()
        return
    else:
        source = f"the default flags of pyproject.toml, {','.join(sorted(state.flags))},"
    raise pytest.UsageError(
        f"{source} cannot be used with tests that run in ranks, which only compare snapshots: deselect these "
        "tests, for example with -m 'not distributed and not devices', or use --inline-snapshot=report"
    )


def _state() -> Any:
    """Return inline-snapshot's state of this process, which includes its flags."""
    state = named("inline_snapshot._global_state", "state")()
    for needed in ("active", "flags", "tmp_dir", "update_flags"):
        getattr(state, needed)
    return state
