"""The place of a session's suite: its rootdir, ini file and limit of conftests, for the other processes of the session.

pytest takes the value of an option that no loaded plugin has registered yet for a path, if it exists. So a process that
parses ``--accel-output /tmp/logs`` when the folder has been made would find another rootdir and ini file than the first
process, in which there was no such folder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

import pytest

GIVEN_OPTIONS = "PYTEST_ACCEL_ADDOPTS"
"""The variable by which an xdist worker gets the user's ``PYTEST_ADDOPTS``."""
_ADDED = "PYTEST_ADDOPTS"


def place_options(config: pytest.Config) -> list[str]:
    """Return the command line options with which another process finds the suite where `config` has found it."""
    cutoff = getattr(config.known_args_namespace, "confcutdir", None) or config.rootpath
    ini_file = [] if config.inipath is None else [f"-c{config.inipath}"]
    return [f"--rootdir={config.rootpath}", *ini_file, f"--confcutdir={config.invocation_params.dir / cutoff}"]


def for_worker(config: pytest.Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for an xdist worker, which gets the controller's command line; `environ` is its own."""
    given = environ.get(_ADDED, "")
    return {_ADDED: f"{given} {shlex.join(place_options(config))}".lstrip(), GIVEN_OPTIONS: given}


def restore_in_worker() -> None:
    """Put back the variable that :func:`for_worker` has changed: processes that tests start would inherit it."""
    given = os.environ.pop(GIVEN_OPTIONS)
    if given:
        os.environ[_ADDED] = given
    else:
        del os.environ[_ADDED]
