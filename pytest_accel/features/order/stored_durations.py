"""Times of tests in earlier sessions, stored in pytest's cache, or in a file (``--accel-durations``).

Jobs of CI hand the file on to each other. Each time has the moment at which its session ended. So files can be merged
in any order and any number of times: the result has every time once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core import whole_file
from pytest_accel.core.stash_keys import SESSION
from pytest_accel.core.terminal_lines import write_line
from pytest_accel.core.truncation import cut_end
from pytest_accel.settings.options import own_path

NO_DEVICE = "none"
"""The kind under which the times of tests that use no device are stored."""
KEPT = 5
"""Number of times that are stored for each test and kind of device: the latest."""
_LARGEST = 1e12
"""The largest allowed number of seconds: the sum of many is still finite."""
_FORMAT = {"format": "pytest-accel durations", "version": 1}
KEY = "accel/durations"
"""Key in pytest's cache; the value is `Durations`."""
_DECAY = 0.8
"""Weight of a session's time relative to that of the session after it."""
_MOST_TESTS = 100_000
"""Maximum number of tests in pytest's cache: those that ran last."""

Durations = dict[str, dict[str, list[float]]]
"""Seconds by node id and kind of device, the latest last."""
SessionTimes = Sequence[tuple[str, str, float]]
"""Node id, kind of device and seconds of the tests of one session. Several tests may have one node id."""
Entries = dict[str, dict[str, list[tuple[float, float]]]]
"""Pairs of a moment (seconds since 1970) and a test's seconds, by node id and kind of device, in this order."""


class DurationsError(Exception):
    """Raised for a file that cannot be read or written, or is not of this format. The message names the file."""


def read(path: Path) -> Entries:
    """Return the contents of the file, nothing if it does not exist; raise `DurationsError` if it is not valid."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or {key: data.get(key) for key in _FORMAT} != _FORMAT:
            raise ValueError(f"it lacks {json.dumps(_FORMAT)[1:-1]}")
        return {
            nodeid: {
                kind: [(_number(moment), _number(took)) for moment, took in pairs] for kind, pairs in kinds.items()
            }
            for nodeid, kinds in data["tests"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DurationsError(f"{path} cannot be read as a file of durations: {cut_end(str(error), 160)}") from None


def _number(value: object) -> float:
    """Return a number from 0 to `_LARGEST`; raise ValueError for another value."""
    # Compare before converting: an integer may be too large for a float.
    if isinstance(value, (int, float)) and 0 <= value <= _LARGEST:
        return float(value)
    raise ValueError(
        f"allowed is [MOMENT, SECONDS] with numbers from 0 to {_LARGEST:g}, not {cut_end(repr(value), 80)}"
    )


def merge(many: Iterable[Entries]) -> Entries:
    """Return all entries, of each test and kind the latest `KEPT`."""
    found: dict[str, dict[str, set[tuple[float, float]]]] = {}
    for entries in many:
        for nodeid, kinds in entries.items():
            for kind, pairs in kinds.items():
                found.setdefault(nodeid, {}).setdefault(kind, set()).update(pairs)
    return {
        nodeid: {kind: sorted(pairs)[-KEPT:] for kind, pairs in sorted(kinds.items())}
        for nodeid, kinds in sorted(found.items())
    }


def write(path: Path, entries: Entries) -> None:
    """Replace the file at once, with one line for each test, in the order of the node ids."""
    tests = ",\n".join(f"  {json.dumps(nodeid)}: {json.dumps(kinds)}" for nodeid, kinds in merge([entries]).items())
    try:
        whole_file.write(str(path), f'{json.dumps(_FORMAT)[:-1]}, "tests": {{\n{tests}\n}}}}\n')
    except OSError as error:
        raise DurationsError(f"{path} cannot be written: {error}") from None


def add(path: Path, times: SessionTimes) -> None:
    """Add the times of a session that ends now to the file."""
    moment = round(time.time(), 3)
    new: list[Entries] = [{nodeid: {kind: [(moment, round(seconds, 4))]}} for nodeid, kind, seconds in times]
    write(path, merge([read(path), *new]))


def expected(values: Sequence[float]) -> float | None:
    """Return the weighted median of a test's times, the latest with most weight; None if there are no times."""
    weighted = sorted((value, _DECAY**age) for age, value in enumerate(reversed(values)))
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in weighted:
        half -= weight
        if half <= 0:
            return value
    return None


def expected_times(durations: Durations, tests: Sequence[tuple[str, str]]) -> list[float | None]:
    """Return the expected seconds of each of `tests`, a node id and a kind of device; None if no time is stored."""
    return [expected(durations.get(nodeid, {}).get(kind, ())) for nodeid, kind in tests]


def recall(config: pytest.Config) -> Durations:
    """Return the stored times: those of the file of ``--accel-durations``, without this option those of the cache."""
    return _of_cache(config) if _path(config) is None else shared(config)


def shared(config: pytest.Config) -> Durations:
    """Return the times in the file of ``--accel-durations``, which several jobs can have; empty without this option."""
    path = _path(config)
    entries = {} if path is None else read(path)
    return {
        test: {kind: [took for _, took in pairs] for kind, pairs in kinds.items()} for test, kinds in entries.items()
    }


def check_file(config: pytest.Config) -> None:
    """Raise ``pytest.UsageError`` unless the file of ``--accel-durations`` can be read and written, if it is given."""
    if (path := _path(config)) is not None:
        try:
            read(path)
            whole_file.check_folder(str(path))
        except (DurationsError, OSError) as error:
            text = error if isinstance(error, DurationsError) else f"{path} cannot be written: {error}"
            raise pytest.UsageError(f"--accel-durations: {text}") from None


def _of_cache(config: pytest.Config) -> Durations:
    """Return the times in pytest's cache, a file that anything may have written; empty if they are not valid."""
    cache: Any = getattr(config, "cache", None)
    try:
        found = (cache.get(KEY, None) if cache is not None else None) or {}
        return {test: {kind: [*map(_number, times)] for kind, times in kinds.items()} for test, kinds in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


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
        self._running: dict[tuple[object, str], list[pytest.TestReport]] = {}
        """The reports so far of each running test, by xdist's worker and node id."""
        self._times: list[tuple[str, str, float]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        run = getattr(report, "node", None), report.nodeid
        if report.when == "setup":
            self._running[run] = []
        self._running.get(run, []).append(report)
        if report.when == "teardown" and (reports := self._running.pop(run, [])) and all(one.passed for one in reports):
            kind = getattr(report, "accel_kind", NO_DEVICE)
            self._times.append((report.nodeid, kind, sum(one.duration for one in reports)))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path, cache = _output(session.config), getattr(session.config, "cache", None)
        if path is not None and not session.config.option.collectonly:
            try:
                add(path, self._times)
            except DurationsError as error:
                write_line(session.config, f"accel: the times of this session are lost: {error}")
        elif path is None and cache is not None and self._times:
            cache.set(KEY, remember(_of_cache(session.config), self._times))


def _path(config: pytest.Config) -> Path | None:
    """Return the file of ``--accel-durations``; a relative path starts at the folder in which pytest was started."""
    value = config.stash[SESSION].settings.durations
    return None if value is None else config.invocation_params.dir / value


def _output(config: pytest.Config) -> Path | None:
    """Return the file to which the session adds its times: that of ``--accel-durations``, or with ``--accel-shard`` one
    of its own beside it, ``durations.2-of-4.json``.

    If the jobs changed the file that they read, those that start later would divide the tests in another way.
    """
    path, shard = _path(config), config.stash[SESSION].settings.shard
    if path is not None and shard is not None:
        path = path.with_name(f"{path.stem}.{shard[0]}-of-{shard[1]}{path.suffix}")
    return None if path is None else Path(own_path(str(path)))
