"""Times of tests in earlier sessions, stored in pytest's cache, or in a file (``--accel-durations``).

Jobs of CI hand the file on to each other. Each time has the moment at which its session ended. So files can be merged
in any order and any number of times: the result has every time once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

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
LARGEST = 1e12
"""The largest allowed number of seconds: the sum of many, and its square, are still finite."""
_LONGEST_SHOWN = 80
"""Characters of a wrong value that an error shows."""
_FORMAT = "pytest-accel durations"
_VERSION = 1

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
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DurationsError(f"{path} cannot be read as a file of durations: {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise DurationsError(f'{path} is no file of durations: it has no "format": "{_FORMAT}"')
    if data.get("version") != _VERSION:
        version = cut_end(repr(data.get("version")), _LONGEST_SHOWN)
        raise DurationsError(f"{path} has version {version} of the format; allowed is {_VERSION}")
    try:
        return {
            nodeid: {kind: [_entry(pair) for pair in pairs] for kind, pairs in kinds.items()}
            for nodeid, kinds in data["tests"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DurationsError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def check(path: Path) -> None:
    """Raise `DurationsError` unless the file can be written, and read if it exists."""
    read(path)
    try:
        whole_file.check_folder(str(path))
    except OSError as error:
        raise DurationsError(f"{path} cannot be written: {error}") from None


def _entry(pair: object) -> tuple[float, float]:
    """Return the pair; raise ValueError unless it has two numbers from 0 to `LARGEST`."""
    match pair:
        # Compare before converting: an integer may be too large for a float.
        case [int() | float() as moment, int() | float() as took] if 0 <= moment <= LARGEST and 0 <= took <= LARGEST:
            return float(moment), float(took)
    raise ValueError(
        f"{cut_end(repr(pair), _LONGEST_SHOWN)}: allowed is [MOMENT, SECONDS] with numbers from 0 to {LARGEST:g}"
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
    text = f'{{\n "format": "{_FORMAT}",\n "version": {_VERSION},\n "tests": {{\n{tests}\n }}\n}}\n'
    try:
        whole_file.write(str(path), text)
    except OSError as error:
        raise DurationsError(f"{path} cannot be written: {error}") from None


def add(path: Path, times: SessionTimes) -> None:
    """Add the times of a session that ends now to the file."""
    moment = round(time.time(), 3)
    new: list[Entries] = [{nodeid: {kind: [(moment, round(seconds, 4))]}} for nodeid, kind, seconds in times]
    write(path, merge([read(path), *new]))


def seconds(entries: Entries) -> Durations:
    """Return the seconds alone."""
    return {
        nodeid: {kind: [took for _, took in pairs] for kind, pairs in kinds.items()}
        for nodeid, kinds in entries.items()
    }


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
    return _of_cache(config) if _path(config) is None else shared(config)


def shared(config: pytest.Config) -> Durations:
    """Return the times in the file of ``--accel-durations``, which several jobs can have; empty without this option."""
    path = _path(config)
    return {} if path is None else seconds(read(path))


def check_file(config: pytest.Config) -> None:
    """Raise ``pytest.UsageError`` unless the file of ``--accel-durations`` can be read and written, if it is given."""
    path = _path(config)
    if path is not None:
        try:
            check(path)
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
            and all(isinstance(value, (int, float)) and 0 <= value <= LARGEST for value in values)
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
        path = _output(session.config)
        cache: Any = getattr(session.config, "cache", None)
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
