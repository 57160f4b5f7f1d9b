"""Fair share between sessions: a session's recent use of the devices moves it back in the wait queue. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY = 10.0
"""Time constant of the exponential decay, in seconds: use that is this old counts 1/e (about a third)."""
_PRICE = 4.0
"""Seconds of handicap in the queue for each recent second in which the session had all its devices."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Recent use of the session's devices, in seconds of all devices; earlier use counts less (exponential decay)."""

    seconds: float = 0.0
    moment: float = 0.0
    """The time to which `seconds` refers, in seconds since the epoch."""

    def at(self, moment: float, part: float) -> Usage:
        """Return the use at a later `moment`, if the session had the fraction `part` of its devices since then."""
        kept = math.exp(-max(0.0, moment - self.moment) / _MEMORY)
        return Usage(self.seconds * kept + part * _MEMORY * (1 - kept), moment)

    @property
    def handicap(self) -> float:
        """Seconds by which a request counts as having arrived later: from 0 to 40."""
        return _PRICE * self.seconds
