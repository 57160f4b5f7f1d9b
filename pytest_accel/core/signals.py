"""Signals by which a rank writes its stacks or collectives or fails its test, SIGPIPE, crashes, names of signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIG_BLOCK, SIG_IGN, SIG_UNBLOCK, SIGPIPE, getsignal, pthread_sigmask, sigpending, sigwait

STACK_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2 - 8) + 8
"""Signal that makes a rank write its stacks.

A real-time signal if the system has any, since programs have their own uses for SIGUSR1 and SIGUSR2.
"""

FLIGHT_SIGNAL: int | None = STACK_SIGNAL + 1 if hasattr(signal, "SIGRTMIN") else None
"""Signal that makes a rank write its record of collectives.

None if the system has no real-time signals, since programs have their own uses for the others.
"""

INTERRUPT_SIGNAL: int | None = STACK_SIGNAL + 2 if hasattr(signal, "SIGRTMIN") else None
"""Signal that makes a rank whose main thread runs Python code fail its test. None where `FLIGHT_SIGNAL` is."""


def ignore_rank_signals() -> None:
    """Ignore the signals above, which would terminate this process, and block `FLIGHT_SIGNAL` for a thread's sigwait.

    Call this before the process has a second thread. A new interpreter inherits both.
    """
    for number in (STACK_SIGNAL, FLIGHT_SIGNAL, INTERRUPT_SIGNAL):
        if number is not None:
            signal.signal(number, SIG_IGN)
    if FLIGHT_SIGNAL is not None:
        pthread_sigmask(SIG_BLOCK, {FLIGHT_SIGNAL})  # Linux keeps a blocked signal, also an ignored one.


@contextmanager
def without_sigpipe() -> Iterator[None]:
    """Have a write to a closed connection raise BrokenPipeError, also if SIGPIPE has its default action.

    Python ignores the signal, but suites restore its default action (``signal(SIGPIPE, SIG_DFL)``), and it would then
    terminate a rank or the session. Call this in any thread; the suite's own writes are left as they are.
    """
    if getsignal(SIGPIPE) is SIG_IGN:
        yield
        return
    before: set[int] = set()
    try:
        before = pthread_sigmask(SIG_BLOCK, (SIGPIPE,))
        yield
    finally:
        if SIGPIPE not in before:
            if SIGPIPE in sigpending():
                sigwait((SIGPIPE,))
            pthread_sigmask(SIG_UNBLOCK, (SIGPIPE,))


_CRASHES = frozenset((signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL))


def is_crash(number: int) -> bool:
    """Return whether faulthandler handles this signal: it writes the stacks before the process ends."""
    return number in _CRASHES


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGSEGV`` for 11, ``signal 99`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
