"""Timeouts that several modules share, in seconds."""

from __future__ import annotations

GRACE = 3.0
"""Seconds that the other ranks have once one has failed: they may be waiting for it for ever."""
AFTER_DEATH = 0.6
"""As `GRACE`, once one has died and none of the others is at work: nothing is to come of them, and the world ends."""
START_PATIENCE = 120.0
"""Seconds that a rank may take to import, configure pytest and join its process group."""
