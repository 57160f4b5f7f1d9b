"""Lock-step: the ranks of a test take each step of its examples together, and each gets the conclusion of all ranks.

A rank imports this module only if the suite has imported Hypothesis.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_accel.core.clock import monotonic
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.features.properties.example_steps import (
    Conclusion,
    Draw,
    ExampleEnd,
    Fetch,
    Leave,
    Opening,
    Outcome,
    Step,
    conclude,
    failure_of,
    from_record,
    stand_in,
    to_record,
)
from pytest_accel.features.properties.exchange import LARGEST, Exchange, ExchangeError, LateRanks

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

__hypothesistracebackhide__ = True
"""Makes Hypothesis hide this module's frames in tracebacks, as it hides its own."""

_FAILED_TIMEOUT = 6.0
"""Seconds that a rank in which an example has failed waits for the others to reach the end of the example.

An example that is late on a busy machine would not be shrunk.
"""
_REJECTED_TIMEOUT = 10.0
"""Seconds that a rank which has rejected or skipped an example waits for the others to reach the end of the example.

The time is limited, because ranks that have not rejected the example may wait for this rank in a collective forever. It
is longer than after a failure, because a rank that is only slow must not fail the test.
"""
_LONGEST_SHOWN = 200
"""Characters of the drawn values that a message shows."""


class ExamplesDiffer(Exception):
    """The ranks of a test do not run the same examples."""

    __module__ = "pytest_accel"  # Reports show it.


class OutOfStep(BaseException):
    """Stops the engine of this rank, because the ranks cannot continue together. Hypothesis must not catch it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class ExampleEnded(BaseException):
    """Stops the body of a test whose example has ended on another rank."""


class Lockstep:
    """Keeps this rank's Hypothesis engine in step with those of the other ranks, during one test of the suite.

    The test runner makes one instance for each test.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self.rank = context.rank
        self.thread = threading.get_ident()
        self.now = 0.0
        """The time for all ranks: that of rank 0 at the last step."""
        self.constants: Any = None
        """The constants from the suite's modules that all ranks draw, set by the engine; None: no test has begun."""
        assert context.signed_store is not None
        name = f"examples/{context.tests}"
        self._exchange = Exchange(context.signed_store, name, context.rank, context.spec.ranks)
        self._data: Any = None
        """Hypothesis's data of the running example."""
        self._conclusion: Conclusion | None = None
        """The conclusion of the running example, if it has ended on another rank while this rank still runs it."""
        self._broken: BaseException | None = None
        """The error that keeps the ranks from continuing together."""
        self.error: BaseException | None = None
        """The exception that ended the last test with examples on this rank."""

    # Steps

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run the Hypothesis tests in the ``with`` block in step with those of the other ranks."""
        global _active
        _active = self
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise
        else:
            self.leave(None)
        finally:
            _active = None

    def take_step(self, step: Step, timeout: float | None = None) -> tuple[list[Any], Conclusion]:
        """Take `step` together with the other ranks; return all steps and the conclusion.

        Raise :class:`OutOfStep` if the ranks cannot continue together, and :class:`LateRanks` if a rank does not reach
        the step within `timeout` seconds (None: no limit).
        """
        if self._broken is not None:
            raise OutOfStep(self._broken)
        try:
            steps = [from_record(record) for record in self._exchange.all_gather(to_record(step), timeout)]
        except (ExchangeError, ValueError) as error:
            raise self.stop(error) from None
        self.now = steps[0].at
        found = conclude(steps)
        if found.outcome == "different":
            raise self.stop(ExamplesDiffer(found.text))
        if found.outcome == "left":
            raise self.stop(ExamplesDiffer(found.text) if found.failure is None else stand_in(found))
        return steps, found

    def stop(self, error: BaseException) -> OutOfStep:
        """Take no more steps because of `error`; return the exception that stops the engine."""
        self._broken = error
        return OutOfStep(error)

    def leave(self, error: BaseException | None) -> None:
        """Tell the other ranks that this one has ended the test, so that they do not wait for it in an example.

        `error` is the exception that has ended the test; None: the exception that ended its last examples, if any.
        """
        error = error or self.error
        if self._exchange.steps:
            self._exchange.leave(to_record(Leave(time.perf_counter(), None if error is None else failure_of(error))))

    def open(self, name: str, seed: int | None, constants: int, *, database: bool) -> list[Opening]:
        """Begin a test with the other ranks; return the openings of all ranks. See `Opening` for the arguments."""
        steps, _ = self.take_step(Opening(time.perf_counter(), name, seed, database, constants))
        return steps

    def share(self, examples: Iterable[bytes]) -> list[bytes]:
        """Return rank 0's `examples` on all ranks. The first ones are shared, as many as fit into a record."""
        texts: list[str] = []
        room = LARGEST - 1000  # The rest is for the other fields of the record.
        for example in examples if self.rank == 0 else ():
            texts.append(base64.b64encode(example).decode())
            room -= len(texts[-1]) + 4  # JSON adds two quotes, a comma and a space.
            if room < 0:
                del texts[-1]
                break
        steps, _ = self.take_step(Fetch(time.perf_counter(), texts))
        return [base64.b64decode(text) for text in steps[0].examples]

    # One example

    @contextlib.contextmanager
    def example(self, data: Any) -> Iterator[None]:
        """Make `data` the running example in the ``with`` block, which may be inside another example."""
        outer = self._data, self._conclusion
        self._data, self._conclusion = data, None
        try:
            yield
        finally:
            self._data, self._conclusion = outer

    def before_draw(self, data: Any) -> None:
        """Take a step with the other ranks before this rank draws more values.

        Raise :class:`ExampleEnded` if the example has ended on another rank.
        """
        if data is not self._data or data.frozen:
            return
        if self._conclusion is None and self._broken is None:
            with contextlib.suppress(OutOfStep):
                _, found = self.take_step(Draw(time.perf_counter(), *drawn_values(data)))
                if found.outcome == "continues":
                    return
                self._conclusion = found
        raise ExampleEnded

    def end(self, outcome: Outcome, error: BaseException | None, seconds: float) -> Conclusion:
        """Send the outcome of the example on this rank to the others; return the conclusion of all ranks."""
        if self._conclusion is not None:
            return self._conclusion
        if self._broken is not None:
            raise OutOfStep(self._broken)
        drawn, shown = drawn_values(self._data)
        targets = {str(label): float(value) for label, value in self._data.target_observations.items()}
        failure = failure_of(error) if outcome == "failed" and error is not None else None
        timeout = {"failed": _FAILED_TIMEOUT, "rejected": _REJECTED_TIMEOUT, "skipped": _REJECTED_TIMEOUT}.get(outcome)
        began = monotonic()
        try:
            _, found = self.take_step(
                ExampleEnd(time.perf_counter(), drawn, shown, outcome, seconds, targets, failure), timeout
            )
        except LateRanks as late:
            text = f"{ranks_text(late.ranks)} did not reach the end of the example within {timeout:g} s"
            if outcome != "failed":
                text = f"rank {self.rank} {outcome} an example, and {text}"
                hint = "a test that rejects or skips an example before a collective must do so on all ranks"
                return Conclusion("broken", self.rank, text=f"{text}: {hint}")
            self._context.failed_at = began  # This rank has waited for the others since then.
            return Conclusion("broken", self.rank, failure, text)
        self._data.target_observations.update(found.targets)
        return found


def drawn_values(data: Any) -> tuple[str, str]:
    """Return a checksum of all values drawn for an example, and the last ones as text for messages."""
    choices = getattr(data, "choices", None)
    text = repr(bytes(data.buffer) if choices is None else tuple(choices))  # Before 6.123, all values were bytes.
    shown = text if len(text) <= _LONGEST_SHOWN else f"…{text[-_LONGEST_SHOWN:]}"
    return f"{len(text)}:{zlib.crc32(text.encode(errors='backslashreplace')):08x}", shown


_active: Lockstep | None = None
"""The lock-step of the running test; None: the test has none, or no test runs."""


def current() -> Lockstep | None:
    """Return the active lock-step; None if there is none, or in another thread than the test's."""
    return _active if _active is not None and _active.thread == threading.get_ident() else None
