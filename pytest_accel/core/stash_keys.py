"""Where the plugin keeps its things on pytest's objects.

The keys are those of the lowest package, and have no types of the packages above it: who reads one says what it is.
"""

from __future__ import annotations

from typing import Any

import pytest

SESSION: pytest.StashKey[Any] = pytest.StashKey()
"""An `AccelSession`, on the config of a driver or controller."""
OUTER: pytest.StashKey[Any] = pytest.StashKey()
"""An `OuterSession`, on the config of a driver that a launcher has started as one of many processes."""
MARKED: pytest.StashKey[Any] = pytest.StashKey()
"""A `MarkedItem`, on an item that runs in a world."""
RANK_PLUGIN = "accel-rank"
"""The name of the plugin by which a rank's session, and no other, is known from its beginning."""
RETRIED = "accel_retried"
"""The property of a report that tells why its test was begun once more (``--accel-retry-dead``)."""
