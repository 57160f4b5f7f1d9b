"""The place of a session's suite: rootdir, ini file and arguments, for the other processes of the session.

pytest takes the value of an option that no loaded plugin has registered yet for a path, if it exists. So a process that
parses ``--accel-output /tmp/logs`` when the folder has been made finds another rootdir, ini file and conftests than the
first process, in which there was no such folder.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from pytest_accel.core.stash_keys import INITIAL_PATHS

_IN_WORKER = "PYTEST_ACCEL_PLACE"
"""The variable by which an xdist worker gets what is not among its options."""
_ADDED = "PYTEST_ADDOPTS"


class SuitePlace(NamedTuple):
    """The decisions of pytest in the controller."""

    root: str
    ini_file: str | None
    conftest_cutoff: str
    paths: tuple[str, ...]
    """The paths for which pytest has loaded conftests before it knew the suite's own options."""

    @classmethod
    def of(cls, config: pytest.Config) -> SuitePlace:
        """Return the decisions of the session of `config`, once its options are parsed."""
        where = config.invocation_params.dir
        cutoff = getattr(config.known_args_namespace, "confcutdir", None) or config.rootpath
        ini_file = None if config.inipath is None else str(config.inipath)
        paths = config.stash.get(INITIAL_PATHS, tuple(config.option.file_or_dir))
        return cls(str(config.rootpath), ini_file, str(where / cutoff), paths)

    @property
    def options(self) -> list[str]:
        """The command line options that make another process decide the same."""
        return [f"--rootdir={self.root}", f"-c{self.ini_file or os.devnull}", f"--confcutdir={self.conftest_cutoff}"]

    def for_worker(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for an xdist worker, which gets the controller's command line; `environ` is its own."""
        added = environ.get(_ADDED)
        return {
            _ADDED: " ".join([*([added] if added else []), shlex.join(self.options)]),
            _IN_WORKER: json.dumps([added, self.ini_file, self.paths]),
        }


def apply_in_worker(config: Any) -> None:
    """Apply what :meth:`SuitePlace.for_worker` has sent; call it before the conftests are loaded.

    Restore the variables, which processes that tests start would inherit.
    """
    received = os.environ.pop(_IN_WORKER, None)
    if received is None:
        return
    added, ini_file, paths = json.loads(received)
    if added is None:
        os.environ.pop(_ADDED, None)
    else:
        os.environ[_ADDED] = added
    apply(config, ini_file, paths)


def apply(config: Any, ini_file: str | None, paths: Sequence[str]) -> None:
    """Make pytest load the conftests for `paths`, and name no ini file in `config` if there is none."""
    from pytest_accel.core.shims import forget_ini_file

    config.known_args_namespace.file_or_dir = list(paths)
    if ini_file is None:
        forget_ini_file(config)
