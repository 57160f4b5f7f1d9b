"""The leases of one world, from their request to their return.

The devices of several machines are requested one machine after the other, in an order that is the same in all sessions.
This prevents deadlocks: of two sessions that need the same machines, the one that gets the first machine also gets the
others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from pytest_accel.core.device import Device
from pytest_accel.leases.demand import LeaseSource, MachineDemand


class MachineLease:
    """The devices or CPU slots of one machine for a world: requested, granted, and then returned.

    The request and the lease have one number, so a notice about the lease may precede its grant.
    """

    def __init__(self, source: LeaseSource, machine: int, demand: MachineDemand) -> None:
        """`machine` is the number of the machine in the session."""
        self.source = source
        self.machine = machine
        self.demand = demand
        self.devices: tuple[Device, ...] = ()
        """The granted devices; none for CPU slots, and before the grant."""
        self.wanted = False
        """True if another request waits for what is leased, as far as was known when the world was made."""
        self.lost: str | None = None
        """Why the devices must not be used any more; None if they may be."""

    @property
    def number(self) -> int:
        """The number of the request and of the lease."""
        return self.demand.number

    @property
    def what(self) -> str:
        """The requested devices or slots, in words."""
        words = self.demand.in_words(self.source.slots)
        return f"{words} of the machine {self.source.name}" if self.source.name else words

    def describe(self, *, pids: Sequence[int] | None = None, test: str | None = None) -> None:
        """Tell other sessions which processes, or which test, use the devices."""
        self.source.describe(self.number, pids=pids, test=test)

    def give_back(self, *, killed: bool = False) -> None:
        """Return the lease, which no process uses any more; `killed` if the processes that used it were killed."""
        self.source.give_back(self.number, killed=killed)


class LeaseRequest:
    """A request for leases of one or more machines: granted as a whole, or not at all."""

    def __init__(
        self,
        lock: threading.RLock,
        parts: Sequence[MachineLease],
        on_grant: Callable[[dict[int, MachineLease]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Take the `parts` in the order in which they are requested, see the module's docstring.

        `on_grant` gets the leases by the number of the machine. `lock` is the pool's lock: callers of the methods hold
        it, and the callbacks are called with it held.
        """
        self.failed: MachineLease | None = None
        """The part that could not be granted."""
        self._lock = lock
        self._parts = parts
        self._on_grant = on_grant
        self._on_failure = on_failure
        self._leases: dict[int, MachineLease] = {}
        self._waiting: MachineLease | None = None
        """The part that has been requested and not granted."""
        self._done = False

    @property
    def unavailable(self) -> str | None:
        """Why the request can never be granted, or None."""
        reasons = (part.source.unavailable(part.demand) for part in self._parts)
        return next((why for why in reasons if why is not None), None)

    def submit(self) -> None:
        """Request the lease of the next machine, or report the grant if all machines have granted theirs."""
        if len(self._leases) == len(self._parts):
            self._done = True
            self._on_grant(self._leases)
            return
        granted_before = len(self._leases)
        part = self._parts[granted_before]
        try:
            part.source.submit(part.demand, partial(self._answered, part))
        except Exception as error:  # Without this, the leases of the other machines would never be returned.
            self._answered(part, error)
            return
        if len(self._leases) == granted_before and not self._done:  # Otherwise it has been answered already.
            self._waiting = part

    def waiting(self) -> str | None:
        """Return a line with the test, what it waits for and who holds that; None if the request does not wait."""
        part, obstacles = self._waiting, self._obstacles()
        if part is None or obstacles is None:
            return None
        waits = f"{part.demand.world.holder.test} waits for {part.what}"
        return ": ".join(filter(None, (waits, "; ".join(obstacles))))

    def cancel_if_waiting(self) -> list[str] | None:
        """Cancel a request that waits and return why it has waited; otherwise do nothing and return None."""
        part, obstacles = self._waiting, self._obstacles()
        if part is None or obstacles is None or not part.source.cancel(part.number):
            return None
        self._waiting = None
        self.cancel()
        return obstacles

    def take_over(self, lease: MachineLease) -> bool:
        """Take `lease` from its holder, without a call of `on_grant`; return True if done.

        This is possible only if the request is for this one lease, and first in the queue.
        """
        part = self._waiting
        if part is None or len(self._parts) > 1 or part.source is not lease.source:
            return False
        if not part.source.pass_on(lease.number, part.number):
            return False
        self._done, self._waiting = True, None
        return True

    def cancel(self) -> None:
        """Cancel the request and give back the leases granted so far. No-op after the grant or a failure."""
        if self._done:
            return
        self._done = True
        if self._waiting is not None:
            self._waiting.source.cancel(self._waiting.number)
        for lease in self._leases.values():
            lease.give_back()

    def _obstacles(self) -> list[str] | None:
        return None if self._waiting is None else self._waiting.source.obstacles(self._waiting.number)

    def _answered(self, part: MachineLease, answer: tuple[Device, ...] | Exception) -> None:
        with self._lock:
            if isinstance(answer, Exception):
                if not self._done:
                    self.failed, self._waiting = part, None
                    self.cancel()
                    self._on_failure(answer)
                return
            if self._done:
                part.give_back()
                return
            part.devices = answer
            self._leases[part.machine] = part
            self._waiting = None
            self.submit()
