"""Hypothesis in ranks: all ranks have one seed and equal settings, and compare each example before they run it.

No API of Hypothesis reaches every test (decorators, bodies, state machines), so its class that runs a test is replaced.
"""

from __future__ import annotations

import hmac
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, wraps
from importlib import import_module
from random import Random
from threading import get_ident
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, errors, reporting, settings

from pytest_accel.rank.context import RankContext
from pytest_accel.rank.gathering import Gathering

__hypothesistracebackhide__ = True  # Hides the frames of this module.
_HINT = (
    "Ranks do not shrink. @reproduce_failure({!r}, {!r}) runs this example again; with distributed(1), Hypothesis "
    "shrinks what fails on one rank, too."
)
_LATE = "rejected an example that other ranks still run after 10 s: before a collective, all ranks must reject it"
core: Any = import_module("hypothesis.core")
_Base: Any = getattr(core, "StateForActualGivenExecution", object)
_running: tuple[RankContext, Gathering, int] | None = None
"""The test that this rank calls, its exchange with the other ranks, and its thread."""


class ExamplesDiffer(Exception):
    """The ranks of a test do not run the same examples."""

    __module__ = "pytest_accel"


class FailedElsewhere(Exception):
    """An example failed on another rank. `verdict/causes.py` knows this name."""

    __module__ = "pytest_accel"


class _Stop(BaseException):
    """Ends Hypothesis's engine, which would repeat the failed example on this rank alone."""


@contextmanager
def pytest_accel_around_call(context: RankContext) -> Iterator[None]:
    """Run the same examples on all ranks, and tell the other ranks if the test fails on this one."""
    global _running
    if context.spec.ranks == 1:
        yield
        return
    _install()
    exchange = Gathering(context, "examples")
    _running = context, exchange, get_ident()
    try:
        yield
    except BaseException as error:
        if exchange.calls:
            with suppress(RuntimeError):  # The process of the store may have died.
                exchange.put(b"skipped the test" if isinstance(error, pytest.skip.Exception) else b"failed")
        raise
    finally:
        _running = None


@cache
def _install() -> None:
    if _Base is object:
        _warn("pytest-accel does not know this release of Hypothesis: each rank draws its own examples")
        return
    core.StateForActualGivenExecution = _Execution
    # Hypothesis draws constants of the suite's modules that a rank has imported, which may be others on each rank.
    providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = type(providers._get_local_constants())


@cache
def _warn(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # A suite whose warnings are errors must not fail.
        warnings.warn(text, errors.HypothesisWarning, stacklevel=2)


def _equal(own: Any) -> Any:
    """Return the settings `own` as far as they have the same effect on all ranks; warn about the user's others."""
    phases = tuple(phase for phase in own.phases if phase in (Phase.explicit, Phase.generate))
    changes: dict[str, Any] = {"database": None, "deadline": None, "phases": phases}
    default = settings.get_profile("default")
    for name, value in changes.items():
        if repr(getattr(own, name)) not in (repr(value), repr(getattr(default, name))):
            _warn(f"distributed tests do without {name}={getattr(own, name)!r} of Hypothesis's settings")
    health = [*own.suppress_health_check, HealthCheck.too_slow]
    return settings(own, suppress_health_check=health, report_multiple_bugs=False, **changes)


def _drawn(data: Any) -> Any:
    return getattr(data, "choices", None) or bytes(getattr(data, "buffer", b""))  # Before 6.123, all were bytes.


class _Execution(_Base):  # type: ignore[misc]
    """One run of Hypothesis in a rank."""

    _test: Any = None
    _data: Any = None
    _last: object = None
    _error: BaseException | None = None
    _in_engine = _rejected = False

    def __init__(self, stuff: Any, test: Any, own: Any, random: Random, wrapped_test: Any, **options: Any) -> None:
        self._test = _running if _running is not None and _running[2] == get_ident() else None
        if self._test is not None:
            if wrapped_test._hypothesis_internal_use_generated_seed is not None:  # Else the user has chosen the seed.
                context = self._test[0]
                seed = int(hmac.digest(context.spec.secret, b"examples/%d" % context.tests, "sha256").hex()[:16], 16)
                wrapped_test._hypothesis_internal_use_generated_seed, random = seed, Random(seed)
            own = _equal(own)

            @wraps(inner := test)
            def test(*args: Any, **kwargs: Any) -> Any:
                __tracebackhide__ = True
                self._compare(f"{self._last}, then {_drawn(self._data)}")
                return inner(*args, **kwargs)

        super().__init__(stuff, test, own, random, wrapped_test, **options)

    def _compare(self, drawn: str) -> None:
        """Wait for the other ranks; raise if they have drawn something else, or have failed."""
        __tracebackhide__ = True
        context: RankContext = self._test[0]
        exchange: Gathering = self._test[1]
        try:
            # The other ranks may wait for this one in a collective of the example that it has rejected.
            values = exchange(
                f"drew {drawn}".encode(errors="backslashreplace"), timedelta(seconds=10) if self._rejected else None
            )
        except RuntimeError as error:
            raise (ExamplesDiffer(f"rank {context.rank} {_LATE}") if self._rejected else error) from None
        self._rejected = False
        told = [value.decode() for value in values]
        if "failed" in told:
            raise FailedElsewhere(f"an example failed on rank {told.index('failed')}")
        if len({*told}) > 1:
            text = "; ".join(f"rank {rank} {what[:200]}" for rank, what in enumerate(told))
            raise ExamplesDiffer(f"{text}: what a test draws, rejects or skips must not depend on the rank")

    def execute_once(self, data: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        self._last, self._data = _drawn(self._data), data
        if not self._in_engine:
            return super().execute_once(data, **options)
        lines: list[object] = []
        shows = dict.fromkeys({"print_example", "print_test_case"} & {*_Base.execute_once.__kwdefaults__}, True)
        try:
            with reporting.with_reporter(lines.append):  # Have Hypothesis print the example, as in its last run.
                return super().execute_once(data, is_final=True, **shows, **options)
        except (errors.StopTest, errors.HypothesisException):
            self._rejected = True
            raise
        except BaseException as error:
            if not isinstance(error, (ExamplesDiffer, FailedElsewhere, *core.skip_exceptions_to_reraise())):
                hint = _HINT.format(core.__version__, core.encode_failure(_drawn(data)))
                vars(error).setdefault("__notes__", []).extend([*lines, hint])
            self._error = error
            raise _Stop from None

    def run_engine(self) -> None:
        __tracebackhide__ = True
        self._in_engine = self._test is not None
        try:
            super().run_engine()
            if self._in_engine:
                self._compare(f"{_drawn(self._data)}, then no more")
            return
        except BaseException as error:
            found = self._error or error  # While it stops, the engine may find that the example is flaky.
        raise found
