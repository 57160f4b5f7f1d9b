"""Where the plugin keeps its things on pytest's objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_accel.items import MarkedItem
    from pytest_accel.launch.outer_session import OuterSession
    from pytest_accel.session import AccelSession
    from pytest_accel.worlds.rank import RankContext

SESSION: pytest.StashKey[AccelSession] = pytest.StashKey()
"""On the config of a driver or controller."""
RANK: pytest.StashKey[RankContext] = pytest.StashKey()
"""On the config of a rank."""
OUTER: pytest.StashKey[OuterSession] = pytest.StashKey()
"""On the config of a driver that a launcher has started as one of many processes."""
RANK_PLUGIN = "accel-rank"
"""The name of the plugin by which a rank's session, and no other, is known from its beginning."""
MARKED: pytest.StashKey[MarkedItem] = pytest.StashKey()
"""On an item that runs in a world."""
