"""pytest-xprocess: each rank has its own external processes, which are terminated with it."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest

from pytest_accel.features.plugins.internals import take
from pytest_accel.rank.context import RANK

_MODULE = "xprocess.pytest_xprocess"


def plugin(config: pytest.Config) -> None:
    """Have a rank store the processes' files in its own folder, not in the shared one in pytest's cache."""
    shared = take(_MODULE, "getrootdir")
    context = config.stash.get(RANK, None)
    if context is None:
        return
    folder = os.path.join(context.session.basetemp, f"accel-w{context.spec.world}r{context.rank}-xprocess")

    def getrootdir(config: pytest.Config) -> Any:
        """Return the rank's folder, as a path of the type that pytest-xprocess uses."""
        os.makedirs(folder, exist_ok=True)
        return type(shared(config))(folder)

    module: Any = import_module(_MODULE)
    module.getrootdir = getrootdir
