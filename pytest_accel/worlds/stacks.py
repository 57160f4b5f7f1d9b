"""The signal by which a rank is asked for its stacks."""

from __future__ import annotations

import signal

STACK_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2 - 8) + 8
"""A real-time signal where there are any, since programs have their own uses for SIGUSR1 and SIGUSR2."""
