"""Times of tests in earlier sessions, stored in pytest's cache, or in a file (``--accel-durations``).

Jobs of CI hand the file on to each other. Each time has the moment at which it was measured, so files can be merged in
any order and any number of times.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from pytest_accel.core import whole_file
from pytest_accel.core.clock import wall_clock
from pytest_accel.core.stash_keys import SESSION
from pytest_accel.core.terminal_lines import write_line
from pytest_accel.core.truncation import cut_end
from pytest_accel.settings.options import own_path

KEPT = 3
"""Number of times that are stored for each test: the latest. One slow session changes no median."""
KEY = "accel/durations"
"""Key in pytest's cache."""
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""The sum of many is still finite."""
Entries = dict[str, list[tuple[_Seconds, _Seconds]]]
"""By node id, pairs of a moment (seconds since 1970) and the test's seconds, in this order."""


class _File(msgspec.Struct):
    tests: Entries
    format: Literal["pytest-accel durations"]
    version: Literal[1]


def read(path: Path) -> Entries:
    """Return the contents of the file, nothing if it does not exist; raise `pytest.UsageError` if it is not valid."""
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), _File).tests
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise pytest.UsageError(f"{path} cannot be read as a file of durations: {cut_end(str(error), 160)}") from None


def merge(many: Iterable[Entries]) -> Entries:
    """Return all entries in the order of the node ids, of each test the latest `KEPT`."""
    found: defaultdict[str, set[tuple[float, float]]] = defaultdict(set)
    for nodeid, pairs in (item for entries in many for item in entries.items()):
        found[nodeid].update(pairs)
    return {nodeid: sorted(pairs)[-KEPT:] for nodeid, pairs in sorted(found.items())}


def add(path: Path, many: Iterable[Entries]) -> Entries:
    """Add entries to the file, one line for each test. Return its new contents."""
    entries = merge([read(path), *many])
    tests = ",\n".join(f"  {json.dumps(nodeid)}: {json.dumps(pairs)}" for nodeid, pairs in entries.items())
    try:
        whole_file.write(str(path), f'{{"format": "pytest-accel durations", "version": 1, "tests": {{\n{tests}\n}}}}\n')
    except OSError as error:
        raise pytest.UsageError(f"{path} cannot be written: {error}") from None
    return entries


def recall(config: pytest.Config) -> Entries:
    """Return the times in the file of ``--accel-durations`` or, without this option, in pytest's cache.

    Invalid content of the cache counts as empty.
    """
    path, cache = _path(config), getattr(config, "cache", None)
    try:
        return read(path) if path is not None else msgspec.convert(cache.get(KEY, {}) if cache else {}, Entries)
    except ValueError:
        return {}


def record_times(config: pytest.Config) -> None:
    """Have the times of this session stored when it ends. With ``--setup-only`` tests are not called and have none."""
    if not config.pluginmanager.has_plugin("accel-durations") and not getattr(config.option, "setuponly", False):
        config.pluginmanager.register(_Recorder(), "accel-durations")


class _Recorder:
    """A pytest plugin that stores the times of the tests that passed, summed over their phases, after a session."""

    def __init__(self) -> None:
        self._running: dict[tuple[object, str], float] = {}
        """The seconds so far of each running test, by xdist's worker and node id."""
        self._times: Entries = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        run = getattr(report, "node", None), report.nodeid
        before = 0.0 if report.when == "setup" else self._running.pop(run, None)
        if before is None or not report.passed:
            return
        self._running[run] = before + report.duration
        if report.when == "teardown":
            pair = round(wall_clock(), 3), round(self._running.pop(run), 4)
            self._times.setdefault(report.nodeid, []).append(pair)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Store the times in the cache or the file; with ``--accel-shard`` in ``durations.2-of-4.json`` beside it.

        If the jobs changed the file that they read, jobs that start later would divide the tests in another way.
        """
        config: Any = session.config
        path, shard = _path(config), config.stash[SESSION].settings.shard
        if path is None and getattr(config, "cache", None) is not None and self._times:
            config.cache.set(KEY, merge([recall(config), self._times]))
        elif path is not None and not config.option.collectonly:
            if shard is not None:
                path = path.with_name(f"{path.stem}.{shard[0]}-of-{shard[1]}{path.suffix}")
            try:
                add(Path(own_path(str(path))), [self._times])
            except pytest.UsageError as error:
                write_line(config, f"accel: the times of this session are lost: {error}")


def _path(config: pytest.Config) -> Path | None:
    """Return the file of ``--accel-durations``; a relative path starts at the folder in which pytest was started."""
    value = config.stash[SESSION].settings.durations
    return None if value is None else config.invocation_params.dir / value


def merge_files(arguments: Sequence[str]) -> int:
    about = "Add the times of tests in files of pytest --accel-durations to another such file."
    parser = argparse.ArgumentParser("python -m pytest_accel durations", description=about, allow_abbrev=False)
    parser.add_argument("result", type=Path, metavar="RESULT", help="the file to add to; it need not exist")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="the files to add, such as those of jobs")
    given = parser.parse_args(arguments)
    if absent := [str(path) for path in given.files if not path.exists()]:
        parser.error(f"{', '.join(absent)}: no such file")
    try:
        print(f"{given.result}: times of {len(add(given.result, map(read, given.files)))} tests")
    except pytest.UsageError as error:
        parser.error(str(error))
    return 0


COMMANDS = {"durations": merge_files}
