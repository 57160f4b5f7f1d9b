"""Launchers that are there, the scripts that they start, and sessions whose tests start some."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_accel.launch.launch_api import missing

SCRIPTS = Path(__file__).parent / "scripts"
_FOREIGN = re.compile("PYTEST_(?!DEBUG_TEMPROOT)|COV|[A-Z]+_VISIBLE_DEVICES$|OMP_NUM_THREADS$|GLOO_SOCKET_IFNAME$")
"""Variables that an outer session or a person may have set, and that `launch` passes on."""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is not that of an outer session."""
    for name in os.environ:
        if _FOREIGN.match(name):
            monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a script of a text."""

    def write(text: str) -> Path:
        path = tmp_path / "trainer.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def use_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Has ``mpirun`` be that of ``openmpi`` or ``mpich``, as Debian names them; skips where it is not installed."""

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
