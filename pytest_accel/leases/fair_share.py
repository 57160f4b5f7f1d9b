"""What a session has had of its devices lately, and what that costs it in the queue between sessions. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY = 10.0
"""Seconds after which use counts a third of what it did (1/e)."""
_PRICE = 4.0
"""Seconds later in the queue for each second in which a session had all its devices."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of all the session's devices, of which the earlier ones count less."""

    seconds: float = 0.0
    moment: float = 0.0
    """When that was so."""

    def at(self, moment: float, part: float) -> Usage:
        """The use at a later `moment`, where the session had this `part` of its devices meanwhile."""
        kept = math.exp(-max(0.0, moment - self.moment) / _MEMORY)
        return Usage(self.seconds * kept + part * _MEMORY * (1 - kept), moment)

    @property
    def handicap(self) -> float:
        """Seconds by which a request counts as having arrived later; at most 40."""
        return _PRICE * self.seconds
