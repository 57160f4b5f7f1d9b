"""The signals by which a rank is asked for its stacks, and for the record of its collectives."""

from __future__ import annotations

import signal

STACK_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2 - 8) + 8
"""A real-time signal where there are any, since programs have their own uses for SIGUSR1 and SIGUSR2."""

FLIGHT_SIGNAL: int | None = STACK_SIGNAL + 1 if hasattr(signal, "SIGRTMIN") else None
"""None where there is none to spare: programs have their own uses for the others."""
