"""Fixtures for the tests of launchers: a plain environment, scripts, and a choice of the MPI."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_accel.features.launch.launch_commands import missing
from tests.launcher_sessions import suite
from tests.run import OUTER_VARIABLES

__all__ = ["plain_environment", "script", "suite", "use_mpi"]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of an outer session from the environment."""
    for name in os.environ:
        if OUTER_VARIABLES.match(name):
            monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Provide a function that writes a script with the given text and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "trainer.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def use_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Provide a function that makes ``mpirun`` that of ``openmpi`` or ``mpich``, as Debian names them.

    It skips the test if this MPI is not installed.
    """

    def use(flavour: str) -> None:
        folder = tmp_path / flavour
        folder.mkdir()
        found = [Path(place, f"mpirun.{flavour}") for place in os.get_exec_path()]
        programs = [path for path in found if path.exists()]
        if not programs:
            reason = missing("mpirun") or f"there is no mpirun.{flavour}"
            pytest.skip(reason)
        wrapper = folder / "mpirun"
        wrapper.write_text(f'#!/bin/sh\nexec {programs[0]} "$@"\n')
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    return use
