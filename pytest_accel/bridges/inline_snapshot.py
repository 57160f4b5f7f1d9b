"""inline-snapshot in ranks: they compare. Changing snapshots of tests that run in ranks is refused.

inline-snapshot changes the source of tests when the session ends, by the values that its own process has seen. In the
driver those of marked tests are missing, so it would trim or leave out what only ranks use.
"""

from __future__ import annotations

import os
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pytest_accel.shims import base_temporary_directory

_HARMLESS = {"disable", "report", "short-report"}
"""Flags of ``--inline-snapshot`` with which no snapshot is changed."""
_VARIABLE = "INLINE_SNAPSHOT_DEFAULT_FLAGS"


def rank_plugin(config: pytest.Config) -> None:
    """Have inline-snapshot compare in this rank, and keep its temporary folder where this rank's folders are."""
    state: Any = import_module("inline_snapshot._global_state").state()
    flags: Any = import_module("inline_snapshot._flags").Flags
    if hasattr(state, "update_flags"):
        state.update_flags = flags()
    if any(getattr(config.known_args_namespace, name, None) for name in ("numprocesses", "tx")):
        state.active = False  # As in the workers of xdist, which do not count missing and wrong values.
    temporary = getattr(state, "tmp_dir", None)
    if temporary is not None:
        temporary.cleanup()
        state.tmp_dir = TemporaryDirectory(prefix="inline-snapshot-", dir=base_temporary_directory(config))


def driver_plugin(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` if the user has asked for snapshots to be changed."""
    given = getattr(config.option, "inline_snapshot", None)
    source, text = ("--inline-snapshot", given) if given else (_VARIABLE, os.environ.get(_VARIABLE, ""))
    if {flag.strip() for flag in text.split(",")} - _HARMLESS - {""}:
        raise pytest.UsageError(
            f"{source}={text} cannot be used with tests that run in ranks, where their snapshots are compared: "
            "deselect these tests, for instance by -m 'not distributed and not devices'"
        )
