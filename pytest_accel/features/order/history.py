"""Times of tests in earlier sessions, stored in pytest's cache, or in the file of ``--accel-durations``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import pytest

from pytest_accel.core.terminal_lines import write_line
from pytest_accel.features.order import durations_file
from pytest_accel.features.order.durations_file import KEPT, Durations, DurationsError, SessionTimes
from pytest_accel.features.order.test_demand import NO_DEVICE
from pytest_accel.settings.options import durations_output, durations_path

KEY = "accel/durations"
"""Key in pytest's cache; the value has lists of seconds by node id and kind of device, the latest last."""
_DECAY = 0.8
"""Weight of a session's time relative to that of the session after it."""
_MOST_TESTS = 100_000
"""Maximum number of tests that are stored: those that ran last."""


def expected(values: Sequence[float]) -> float | None:
    """Return the weighted median of a test's times, the latest with most weight; None if there are no times."""
    weighted = sorted((value, _DECAY**age) for age, value in enumerate(reversed(values)))
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in weighted:
        half -= weight
        if half <= 0:
            return value
    return None


def recall(config: pytest.Config) -> Durations:
    """Return the stored times: those of the file of ``--accel-durations``, without this option those of the cache."""
    return _of_cache(config) if durations_path(config) is None else shared(config)


def shared(config: pytest.Config) -> Durations:
    """Return the times in the file of ``--accel-durations``, which several jobs can have; empty without this option."""
    path = durations_path(config)
    return {} if path is None else durations_file.seconds(durations_file.read(path))


def check_file(config: pytest.Config) -> None:
    """Raise ``pytest.UsageError`` unless the file of ``--accel-durations`` can be read and written, if it is given."""
    path = durations_path(config)
    if path is not None:
        try:
            durations_file.check(path)
        except DurationsError as error:
            raise pytest.UsageError(f"--accel-durations: {error}") from None


def _of_cache(config: pytest.Config) -> Durations:
    """Return the times in pytest's cache; empty if pytest has no cache, or the stored value is invalid."""
    cache = getattr(config, "cache", None)
    found = cache.get(KEY, None) if cache is not None else None
    return found if _is_valid(found) else {}


def _is_valid(found: object) -> TypeGuard[Durations]:
    """Return whether a value of the cache, a file that anything may have written, has the type `Durations`."""
    return isinstance(found, dict) and all(
        isinstance(kinds, dict)
        and all(
            isinstance(values, list)
            and all(isinstance(value, (int, float)) and 0 <= value <= durations_file.LARGEST for value in values)
            for values in kinds.values()
        )
        for kinds in found.values()
    )


def expected_times(durations: Durations, tests: Sequence[tuple[str, str]]) -> list[float | None]:
    """Return the expected seconds of each of `tests`, a node id and a kind of device; None if no time is stored."""
    return [expected(durations.get(nodeid, {}).get(kind, ())) for nodeid, kind in tests]


def remember(durations: Durations, times: SessionTimes) -> Durations:
    """Return `durations` with the `times` of one more session added."""
    kept = dict(durations)
    for nodeid, kind, seconds in times:
        earlier = kept.pop(nodeid, {})
        kept[nodeid] = earlier | {kind: [*earlier.get(kind, ()), round(seconds, 4)][-KEPT:]}
    return dict(list(kept.items())[-_MOST_TESTS:])


def record_times(config: pytest.Config) -> None:
    """Have the times of this session stored when it ends. With ``--setup-only`` tests are not called and have none."""
    if not config.pluginmanager.has_plugin("accel-durations") and not getattr(config.option, "setuponly", False):
        config.pluginmanager.register(_Recorder(), "accel-durations")


class _Recorder:
    """A pytest plugin that stores the times of the tests that passed, summed over their phases, after a session."""

    def __init__(self) -> None:
        self._running: dict[tuple[object, str], tuple[float, bool]] = {}
        """Seconds so far, and whether all has passed, of each running test, by xdist's worker and node id."""
        self._times: list[tuple[str, str, float]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        run = getattr(report, "node", None), report.nodeid
        if report.when == "setup":
            self._running[run] = 0.0, True
        if run not in self._running:
            return
        seconds, passed = self._running.pop(run)
        seconds, passed = seconds + report.duration, passed and report.passed
        if report.when != "teardown":
            self._running[run] = seconds, passed
        elif passed:
            self._times.append((report.nodeid, getattr(report, "accel_kind", NO_DEVICE), seconds))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path = durations_output(session.config)
        cache: Any = getattr(session.config, "cache", None)
        if path is not None and not session.config.option.collectonly:
            try:
                durations_file.add(path, self._times)
            except DurationsError as error:
                write_line(session.config, f"accel: the times of this session are lost: {error}")
        elif path is None and cache is not None and self._times:
            cache.set(KEY, remember(_of_cache(session.config), self._times))
