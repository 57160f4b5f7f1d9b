"""The thread in which a broker polls the locks and wait files of other sessions, which send no notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, ExceptHookArgs, Lock, Thread, current_thread, excepthook

from pytest_accel.core import threads
from pytest_accel.core.clock import monotonic

_FAST_POLL = 0.002
"""Seconds between attempts to lock devices of other sessions, during `_FAST_POLL_TIME` seconds after a change."""
_FAST_POLL_TIME = 1.0
_SLOW_POLL = 0.020
"""Seconds between these attempts later on."""
_QUEUE_CHECK_INTERVAL = 0.100
"""Seconds between checks if other sessions wait for devices of this one."""
_QUEUE_CHECK_AFTER_HIT = 0.025
"""Seconds until the next such check after one that has found a lease that another session waits for."""
_LOCK_CHECK_INTERVAL = 0.5
"""Seconds between checks that the lock files of leased devices still exist."""
_IDLE_TIME = 1.0
"""Seconds after which the thread ends if no device is leased and no request waits for another session."""


@dataclass(slots=True)
class PollSchedule:
    """The times at which a polling thread has something to do, in the time of `clock.monotonic`."""

    queue_check: float
    """Time of the next check of the wait queue."""
    lock_check: float
    """Time of the next check of the lock files."""
    idle_since: float
    """Time at which the thread was last needed."""

    def is_over(self, now: float, *, needed: bool) -> bool:
        """Return True if the thread has not been needed for a while. `needed` is True if it is needed now."""
        if needed:
            self.idle_since = now
        return now - self.idle_since > _IDLE_TIME

    def queue_check_due(self, now: float) -> bool:
        """Return True if the wait queue is to be checked now."""
        return now >= self.queue_check

    def queue_checked(self, now: float, *, hit: bool) -> None:
        """Plan the next check; `hit` is True if this one has found a lease that another session waits for."""
        self.queue_check = now + (_QUEUE_CHECK_AFTER_HIT if hit else _QUEUE_CHECK_INTERVAL)

    def lock_check_due(self, now: float) -> bool:
        """Return True if the lock files are to be checked now, and plan the next check."""
        due = now >= self.lock_check
        if due:
            self.lock_check = now + _LOCK_CHECK_INTERVAL
        return due

    def pause(self, now: float, changed: float, *, waiting: bool) -> float:
        """Return the seconds until the next poll.

        `waiting` is True if a request waits for another session. `changed` is the time of the last change in this
        session: other sessions may react to it soon, so polls are frequent for some time after it.
        """
        if not waiting:
            return self.queue_check - now
        return _FAST_POLL if now - changed < _FAST_POLL_TIME else _SLOW_POLL


Callback = Callable[[], None]


class PollingThread:
    """A thread that polls while it is needed, and is started again when it is needed again.

    It shares the lock of its owner, who holds it while calling :meth:`start`, :meth:`hurry` and :meth:`stop`.
    """

    def __init__(
        self,
        lock: Lock,
        poll: Callable[[PollSchedule, float], tuple[Sequence[Callback], float] | None],
        run_callbacks: Callable[[Sequence[Callback]], None],
        on_error: Callable[[Exception], Sequence[Callback]],
    ) -> None:
        """``poll(schedule, now)`` does one round and returns callbacks and the seconds until the next round.

        If it returns None, the thread ends. If it raises, the thread ends too, and ``on_error(error)`` returns the
        callbacks that handle the error; if there are none, `threading.excepthook` reports it. Both are called with the
        lock held. ``run_callbacks(callbacks)`` is called after each round without the lock; it may raise.
        """
        self._changed = Condition(lock)
        self._poll = poll
        self._run_callbacks = run_callbacks
        self._on_error = on_error
        self._thread: Thread | None = None
        self._pause = 0.0

    def start(self) -> None:
        """Start the thread unless it runs. Raise RuntimeError if this process cannot have more threads."""
        if self._thread is None:
            self._thread = threads.start(self._run, "accel-broker")

    def hurry(self) -> None:
        """Have the thread poll at once, unless it polls often already."""
        if self._thread is not None and self._pause > _FAST_POLL:
            self._changed.notify()

    def stop(self) -> Thread | None:
        """Wake the thread, so that `poll` can end it; return the thread to join after releasing the lock."""
        self._changed.notify_all()
        return self._thread

    def _run(self) -> None:
        now = monotonic()
        schedule = PollSchedule(now, now, now)
        failure: Exception | None = None
        while failure is None:
            with self._changed:
                now = monotonic()
                try:
                    polled = self._poll(schedule, now)
                except Exception as error:
                    failure = error
                    self._thread = None  # The callbacks may start a new thread.
                    callbacks = self._on_error(error)
                else:
                    if polled is None:
                        self._thread = None
                        return
                    callbacks, self._pause = polled
                    if not callbacks:
                        self._changed.wait(self._pause)
            if failure is not None and not callbacks:
                _report(failure)
            try:
                self._run_callbacks(callbacks)
            except Exception as error:
                _report(error)


def _report(error: Exception) -> None:
    thread = current_thread()
    excepthook(ExceptHookArgs((type(error), error, error.__traceback__, thread)))
