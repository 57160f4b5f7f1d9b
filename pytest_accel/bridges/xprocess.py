"""pytest-xprocess: each rank has external processes of its own, which end with it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pytest_accel.stash import RANK


def rank_plugin(config: pytest.Config) -> None:
    from xprocess import pytest_xprocess

    context = config.stash[RANK]
    shared = pytest_xprocess.getrootdir

    def getrootdir(config: pytest.Config) -> Any:
        """Return the folder for the processes' files, in place of the one in pytest's cache that all would share."""
        folder = os.path.join(context.session.basetemp, f"w{context.spec.world}r{context.rank}-xprocess")
        os.makedirs(folder, exist_ok=True)
        return type(shared(config))(folder)  # A path of the kind that pytest's cache gives.

    pytest_xprocess.getrootdir = getrootdir
