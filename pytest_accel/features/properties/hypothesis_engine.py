"""Hypothesis in the ranks of a test: all ranks run the same examples and agree on the outcome of each.

Every rank runs Hypothesis's engine. With the same seed, database, clock and outcomes, the engines make the same
decisions. So all ranks generate and shrink the same examples at the same time, and their collectives match.

Hypothesis has no public API for that. This module is the only one that replaces internals of Hypothesis (6.100 or
later). A rank imports it only if the suite has imported Hypothesis.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from random import Random
from types import CodeType
from typing import Any

import hypothesis
from hypothesis import HealthCheck, core, errors
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase
from hypothesis.internal import scrutineer
from hypothesis.internal.conjecture import data as conjecture
from hypothesis.internal.conjecture import engine

from pytest_accel.core.clock import monotonic
from pytest_accel.core.serialization import mark_repeated
from pytest_accel.features.properties.example_steps import (
    LONGEST_TEXT,
    Conclusion,
    Opening,
    Outcome,
    add_note,
    failure_of,
    raise_at,
    stand_in,
)
from pytest_accel.features.properties.lockstep import (
    ExampleEnded,
    ExamplesDiffer,
    Lockstep,
    OutOfStep,
    current,
    drawn_values,
)

__hypothesistracebackhide__ = True
"""Makes Hypothesis hide this module's frames in tracebacks, as it hides its own."""

_core: Any = core
_engine: Any = engine
_providers: Any = None
"""Hypothesis's module with the constants of the suite; None before 6.130, which does not draw such constants."""
with contextlib.suppress(ImportError):
    from hypothesis.internal.conjecture import providers as _found

    _providers = _found if hasattr(_found, "_get_local_constants") else None


class LockstepExecution(_core.StateForActualGivenExecution):  # type: ignore[misc]
    """One run of a test with ``@given``, or of a state machine. Replaces Hypothesis's own class."""

    def __init__(
        self, stuff: Any, test: Callable[..., Any], settings: Any, random: Random, wrapped_test: Any, **options: Any
    ) -> None:
        __tracebackhide__ = True
        self._lockstep = current()
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._examples = 0
        self._test = test
        self._deadline = settings.deadline
        if self._lockstep is not None:
            settings, random = self._begin(self._lockstep, test, settings, random, wrapped_test)
            test = self._recording(test)
        super().__init__(stuff, test, settings, random, wrapped_test, **options)

    def _begin(
        self, lockstep: Lockstep, test: Any, settings: Any, random: Random, wrapped_test: Any
    ) -> tuple[Any, Random]:
        """Begin the test on all ranks; return the settings and `Random` with which all draw the same examples."""
        seed = wrapped_test._hypothesis_internal_use_generated_seed
        first = self._unless_out_of_step(
            _open_on_all_ranks, lockstep, test.__name__, seed, settings.database is not None
        )
        if first.seed is not None:
            wrapped_test._hypothesis_internal_use_generated_seed = first.seed  # Hypothesis shows it, to repeat a run.
            random = Random(first.seed)
        # A rank's own clock must not decide about the test: `_run` checks the deadline for all ranks, and only rank 0
        # checks whether the test draws too slowly.
        changes: dict[str, Any] = {"deadline": None}
        if lockstep.rank:
            changes["suppress_health_check"] = {*settings.suppress_health_check, HealthCheck.too_slow}
        if settings.database is not None:
            changes["database"] = _SharedDatabase(lockstep, settings.database) if first.database else None
        return hypothesis.settings(settings, **changes), random

    def _recording(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """Return `test` with a wrapper that records its arguments."""

        @functools.wraps(test)
        def record(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self._arguments = args, kwargs
            return test(*args, **kwargs)

        return record

    def run_engine(self) -> Any:
        __tracebackhide__ = True
        if self._lockstep is None:
            return super().run_engine()
        try:
            return self._unless_out_of_step(super().run_engine)
        except BaseException as error:
            self._lockstep.error = error
            raise

    def execute_once(self, data: Any, *, is_final: bool = False, expected_failure: Any = None, **options: Any) -> Any:
        """Run one example on all ranks. All of them return, or all of them raise exceptions with the same meaning."""
        __tracebackhide__ = True
        options["is_final"] = is_final
        if self._lockstep is None:
            return super().execute_once(data, expected_failure=expected_failure, **options)
        if is_final:
            return self._unless_out_of_step(self._run, self._lockstep, data, options, expected_failure)
        return self._run(self._lockstep, data, options, expected_failure)

    def _run(self, lockstep: Lockstep, data: Any, options: dict[str, Any], expected_failure: Any) -> Any:
        """Run an example; raise if the slowest rank exceeded the deadline, or if a failure was expected."""
        __tracebackhide__ = True
        result, found = self._run_once(lockstep, data, options)
        replay = getattr(conjecture.ConjectureData, "for_choices", None)
        if self._examples == 1 and replay is not None and self._is_late(found, data, options["is_final"]):
            # The first example includes the time in which the ranks connected to each other. Measure a second run.
            result, found = self._run_once(lockstep, replay(data.choices), options)
        if self._examples > 1 and self._is_late(found, data, options["is_final"]):
            error = errors.DeadlineExceeded(datetime.timedelta(seconds=found.seconds), self._deadline)
            add_note(error, f"rank {found.slowest} was the slowest")
            if found.slowest != lockstep.rank:
                mark_repeated(error, found.slowest, own=True)
            raise_at(error, *self._place)
        if expected_failure is not None:
            raise _flaky(expected_failure[0])
        return result

    def _run_once(self, lockstep: Lockstep, data: Any, options: dict[str, Any]) -> tuple[Any, Conclusion]:
        """Run an example; return its result and the conclusion of all ranks, or raise if it has not passed on all."""
        __tracebackhide__ = True
        result = error = None
        with lockstep.example(data):
            began = time.perf_counter()
            try:
                # `expected_failure` is not passed: `_run` checks it for all ranks.
                result = super().execute_once(data, **options)
            except BaseException as raised:
                error = raised
            seconds = time.perf_counter() - began - sum(data.draw_times.values())
            try:
                outcome = _outcome(error)
                if outcome is None:
                    assert error is not None
                    raise error
                found = lockstep.end(outcome, error, seconds)
                self._examples += 1
                if outcome != found.outcome or outcome == "failed":
                    self._raise(lockstep, found, error if outcome == "failed" else None, data, options["is_final"])
                if error is not None:
                    raise error
                return result, found
            finally:
                self._arguments = None
                del error

    def _is_late(self, found: Conclusion, data: Any, is_final: bool) -> bool:
        """Return whether the slowest rank exceeded the deadline, which a state machine does not have."""
        if self._deadline is None or getattr(data, "_stateful_repr_parts", None) is not None:
            return False
        # Like Hypothesis, allow a quarter more until the final run.
        limit: float = self._deadline.total_seconds() * (1.0 if is_final else 1.25)
        return found.seconds >= limit

    def _unless_out_of_step(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function`. If it raises `OutOfStep`, raise its `error`, outside of Hypothesis's engine."""
        __tracebackhide__ = True
        try:
            return function(*args)
        except OutOfStep as stop:
            error = stop.error
        if error.__traceback__ is None:
            raise_at(error, *self._place)
        raise error

    @property
    def _place(self) -> tuple[str, int]:
        """File and line of the test."""
        code: CodeType | None = getattr(inspect.unwrap(self._test), "__code__", None)
        return (__file__, 1) if code is None else (code.co_filename, code.co_firstlineno)

    def _raise(
        self, lockstep: Lockstep, found: Conclusion, own: BaseException | None, data: Any, is_final: bool
    ) -> None:
        """Raise the exception of an example that has not passed on all ranks. `own` is this rank's failure, if any."""
        __tracebackhide__ = True
        if found.outcome == "rejected":
            raise errors.UnsatisfiedAssumption(f"rejected on rank {found.rank}")
        if found.outcome == "broken":
            raise lockstep.stop(self._last_error(lockstep, found, own, data))
        assert found.failure is not None
        if own is not None and is_final:  # The report shows this rank's own failure.
            if found.rank != lockstep.rank and failure_of(own).origin == found.failure.origin:
                mark_repeated(own, found.rank, own=True)
            raise own
        error = stand_in(found)
        if own is not None:
            error.__cause__ = own
        raise_at(error, found.failure.path, found.failure.line)

    def _last_error(self, lockstep: Lockstep, found: Conclusion, own: BaseException | None, data: Any) -> BaseException:
        """Return the exception that this rank reports for an example after which the ranks cannot continue together."""
        if own is None and found.failure is not None:
            return stand_in(found)
        error = own or ExamplesDiffer(found.text)
        why = "" if own is None else f": {found.text or 'the ranks did not draw alike before it failed'}"
        add_note(error, f"Failing test case: {self._example(data)[:LONGEST_TEXT]}\n(not shrunk{why})")
        if own is None and found.rank != lockstep.rank:
            mark_repeated(error, found.rank, own=True)
        return error

    def _example(self, data: Any) -> str:
        """Return a text that describes the running example, for messages."""
        if self._arguments is None:  # The example failed before the test was called.
            return f"{self._test.__name__}, which drew {drawn_values(data)[1]}"
        if getattr(data, "_stateful_repr_parts", None) is not None:
            return f"<state machine>, which drew {drawn_values(data)[1]}"
        args, kwargs = self._arguments
        words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return f"{self._test.__name__}({', '.join(words)})"


class _SharedDatabase(ExampleDatabase):
    """The database of rank 0, shared with all ranks. Other databases are not used."""

    def __init__(self, lockstep: Lockstep, database: ExampleDatabase) -> None:
        super().__init__()
        self._lockstep = lockstep
        self._database = database

    def fetch(self, key: bytes) -> Iterable[bytes]:
        return self._lockstep.share(self._database.fetch(key))

    def save(self, key: bytes, value: bytes) -> None:
        if self._lockstep.rank == 0:
            self._database.save(key, value)

    def delete(self, key: bytes, value: bytes) -> None:
        if self._lockstep.rank == 0:
            self._database.delete(key, value)

    def move(self, src: bytes, dest: bytes, value: bytes) -> None:
        if self._lockstep.rank == 0:
            self._database.move(src, dest, value)


class _Clock:
    """Replacement of the module `time` in Hypothesis's engine, with one clock for all ranks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def perf_counter(self) -> float:
        lockstep = current()
        return time.perf_counter() if lockstep is None else lockstep.now

    def monotonic(self) -> float:
        lockstep = current()
        return monotonic() if lockstep is None else lockstep.now


@functools.cache
def install() -> None:
    """Replace parts of Hypothesis with those of this module, which have an effect only while a lock-step is active."""
    _core.StateForActualGivenExecution = LockstepExecution
    _engine.time = _Clock()
    scrutineer.UNHELPFUL_LOCATIONS += ("/pytest_accel/rank/*.py",)  # type: ignore[assignment]
    _before(st.DataObject, "draw", lambda drawing, *args, **kwargs: drawing.conjecture_data)
    start = "start_span" if hasattr(conjecture.ConjectureData, "start_span") else "start_example"
    _before(conjecture.ConjectureData, start, _data_of_machine)
    if _providers is None:
        return
    local_constants = _providers._get_local_constants

    def agreed_constants() -> Any:
        lockstep = current()
        return local_constants() if lockstep is None or lockstep.constants is None else lockstep.constants

    _providers._get_local_constants = agreed_constants


def _data_of_machine(data: Any, label: int, *args: Any, **kwargs: Any) -> Any:
    """Return `data` if a state machine begins its run, else None."""
    stateful = sys.modules.get("hypothesis.stateful")
    return data if stateful is not None and label == stateful.STATE_MACHINE_RUN_LABEL else None


def _before(kind: type, name: str, data_of: Callable[..., Any]) -> None:
    """Take a step with the other ranks before each call of the method `name` of `kind`.

    `data_of` returns the example's data from the arguments of a call, or None for a call without a step.
    """
    method = getattr(kind, name)

    @functools.wraps(method)
    def step_before(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        lockstep = current()
        if lockstep is not None and (data := data_of(*args, **kwargs)) is not None:
            lockstep.before_draw(data)
        return method(*args, **kwargs)

    setattr(kind, name, step_before)


def _outcome(error: BaseException | None) -> Outcome | None:
    """Return the outcome of an example that raised `error`; None if the exception ends the whole test."""
    if error is None:
        return "passed"
    if isinstance(error, (errors.StopTest, ExampleEnded)):
        return "stopped"
    if isinstance(error, errors.UnsatisfiedAssumption):
        return "rejected"
    if isinstance(error, _core.skip_exceptions_to_reraise()):
        return "skipped"
    fatal = (errors.FailedHealthCheck, getattr(errors, "BackendCannotProceed", ()))
    if isinstance(error, _core.failure_exceptions_to_catch()) and not isinstance(error, fatal):
        return "failed"
    return None


def _open_on_all_ranks(lockstep: Lockstep, name: str, seed: int | None, database: bool) -> Opening:
    """Begin a test on all ranks, with constants that are equal on all of them; return rank 0's opening."""
    constants = None if _providers is None else _providers._get_local_constants()
    openings = lockstep.open(name, seed, _checksum(constants), database=database)
    if constants is not None and len({opening.constants for opening in openings}) > 1:
        constants = type(constants)()  # The ranks have imported different modules, so they use no constants.
        _providers.CONSTANTS_CACHE.cache.clear()
    lockstep.constants = constants
    return openings[0]


_summed: tuple[Any, int] = (None, 0)
"""The constants of the last call of :func:`_checksum`, and their checksum."""


def _checksum(constants: Any) -> int:
    """Return a checksum of Hypothesis's constants. Cached: Hypothesis creates a new object if they change."""
    global _summed
    if constants is not None and _summed[0] is not constants:
        _summed = constants, zlib.crc32(repr(sorted(map(repr, constants))).encode(errors="backslashreplace"))
    return _summed[1]


def _flaky(error: BaseException) -> BaseException:
    """Return Hypothesis's error for an example that failed with `error` at first, and then passed."""
    text = "Flaky: the example failed on the first call but did not on a subsequent one"
    kind: Any = getattr(errors, "FlakyFailure", None)
    return errors.Flaky(text) if kind is None else kind(text, [error])
