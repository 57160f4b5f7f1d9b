"""Times of tests in earlier sessions, stored in pytest's cache, or in a file (``--accel-durations``).

Jobs of CI hand the file on to each other. Each time has the moment at which its session ended. So files can be merged
in any order and any number of times: the result has every time once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
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
_MOST_TESTS = 100_000
"""Maximum number of tests that are stored: those that ran last. Ids with random parts would add up forever."""
KEY = "accel/durations"
"""Key in pytest's cache."""
_DECAY = 0.8
"""Weight of a session's time relative to that of the session after it."""

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""The sum of many is still finite."""
Entries = dict[str, dict[str, list[tuple[_Seconds, _Seconds]]]]
"""Pairs of a moment (seconds since 1970) and a test's seconds, by node id and kind of device, in this order."""


class _File(msgspec.Struct):
    format: Literal["pytest-accel durations"]
    version: Literal[1]
    tests: Entries


class DurationsError(Exception):
    """Raised for a file that cannot be read or written, or is not of this format. The message names the file."""


def read(path: Path) -> Entries:
    """Return the contents of the file, nothing if it does not exist; raise `DurationsError` if it is not valid."""
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), _File).tests
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DurationsError(f"{path} cannot be read as a file of durations: {cut_end(str(error), 160)}") from None


def merge(many: Iterable[Entries]) -> Entries:
    """Return all entries, of each test and kind the latest `KEPT`."""
    found: dict[str, dict[str, set[tuple[float, float]]]] = {}
    for test, kinds in (item for entries in many for item in entries.items()):
        for kind, pairs in kinds.items():
            found.setdefault(test, {}).setdefault(kind, set()).update(pairs)
    latest = sorted(found, key=lambda test: max(max(pairs, default=(0, 0)) for pairs in found[test].values()))
    return {
        test: {kind: sorted(pairs)[-KEPT:] for kind, pairs in sorted(found[test].items())}
        for test in sorted(latest[-_MOST_TESTS:])
    }


def write(path: Path, entries: Entries) -> None:
    """Replace the file at once, with one line for each test, in the order of the node ids."""
    tests = ",\n".join(f"  {json.dumps(nodeid)}: {json.dumps(kinds)}" for nodeid, kinds in entries.items())
    try:
        whole_file.write(str(path), f'{{"format": "pytest-accel durations", "version": 1, "tests": {{\n{tests}\n}}}}\n')
    except OSError as error:
        raise DurationsError(f"{path} cannot be written: {error}") from None


def add(path: Path, times: Sequence[tuple[str, str, float]]) -> None:
    """Add the times of a session that ends now to the file: node id, kind of device and seconds of its tests."""
    write(path, merge([read(path), *_entries(times)]))


def _entries(times: Sequence[tuple[str, str, float]]) -> list[Entries]:
    moment = round(time.time(), 3)
    return [{nodeid: {kind: [(moment, round(seconds, 4))]}} for nodeid, kind, seconds in times]


def expected(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the weighted median of a test's times, the latest with most weight; None if there are no times."""
    weighted = sorted((took, _DECAY**age) for age, (_, took) in enumerate(reversed(pairs)))
    half = sum(weight for _, weight in weighted) / 2
    for took, weight in weighted:
        half -= weight
        if half <= 0:
            return took
    return None


def expected_times(stored: Entries, tests: Sequence[tuple[str, str]]) -> list[float | None]:
    """Return the expected seconds of each of `tests`, a node id and a kind of device; None if no time is stored."""
    return [expected(stored.get(nodeid, {}).get(kind, ())) for nodeid, kind in tests]


def recall(config: pytest.Config) -> Entries:
    """Return the stored times: those of the file of ``--accel-durations``, without this option those of the cache."""
    return _of_cache(config) if _path(config) is None else shared(config)


def shared(config: pytest.Config) -> Entries:
    """Return the times in the file of ``--accel-durations``, which several jobs can have; empty without this option."""
    path = _path(config)
    return {} if path is None else read(path)


def _of_cache(config: pytest.Config) -> Entries:
    """Return the times in pytest's cache, a file that anything may have written; empty if they are not valid."""
    cache: Any = getattr(config, "cache", None)
    try:
        return msgspec.convert(cache.get(KEY, {}), Entries)
    except (ValueError, AttributeError):  # Without the plugin of the cache there is none.
        return {}


def check_file(config: pytest.Config) -> None:
    """Raise ``pytest.UsageError`` unless the file of ``--accel-durations`` can be read and written."""
    path = _path(config)
    assert path is not None
    try:
        read(path)
        whole_file.check_folder(str(path))
    except DurationsError as error:
        raise pytest.UsageError(f"--accel-durations: {error}") from None
    except OSError as error:
        raise pytest.UsageError(f"--accel-durations: {path} cannot be written: {error}") from None


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
        """Store the times in the cache or the file; with ``--accel-shard`` in one beside it, ``durations.2-of-4.json``.

        If the jobs changed the file that they read, those that start later would divide the tests in another way.
        """
        config, cache = session.config, getattr(session.config, "cache", None)
        path, shard = _path(config), config.stash[SESSION].settings.shard
        if path is None and cache is not None and self._times:
            cache.set(KEY, merge([_of_cache(config), *_entries(self._times)]))
        elif path is not None and not config.option.collectonly:
            if shard is not None:
                path = path.with_name(f"{path.stem}.{shard[0]}-of-{shard[1]}{path.suffix}")
            try:
                add(Path(own_path(str(path))), self._times)
            except DurationsError as error:
                write_line(config, f"accel: the times of this session are lost: {error}")


def _path(config: pytest.Config) -> Path | None:
    """Return the file of ``--accel-durations``; a relative path starts at the folder in which pytest was started."""
    value = config.stash[SESSION].settings.durations
    return None if value is None else config.invocation_params.dir / value
