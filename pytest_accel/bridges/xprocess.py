"""pytest-xprocess: each rank has its own external processes, which are terminated with it."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest

from pytest_accel.bridges.internals import take
from pytest_accel.rank.context import RANK

_MODULE = "xprocess.pytest_xprocess"


def rank_plugin(config: pytest.Config) -> None:
    """Have a rank store the processes' files in its own folder, not in the shared one in pytest's cache."""
    context = config.stash[RANK]
    shared = _getrootdir()

    def getrootdir(config: pytest.Config) -> Any:
        """Return the rank's folder, as a path of the type that pytest-xprocess uses."""
        folder = os.path.join(context.session.basetemp, f"w{context.spec.world}r{context.rank}-xprocess")
        os.makedirs(folder, exist_ok=True)
        return type(shared(config))(folder)

    module: Any = import_module(_MODULE)
    module.getrootdir = getrootdir


def driver_plugin(config: pytest.Config) -> None:
    """Refuse a release in which the processes' folder cannot be replaced."""
    _getrootdir()


def _getrootdir() -> Any:
    """Return pytest-xprocess's function that returns the folder of the processes' files."""
    return take("pytest-xprocess", _MODULE, "getrootdir")
