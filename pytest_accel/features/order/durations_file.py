"""Durations of tests in a JSON file that jobs of CI hand on to each other (``--accel-durations``).

Each time has the moment at which its session ended. So files can be merged in any order and any number of times: the
result has every time once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from pytest_accel.core import whole_file
from pytest_accel.core.truncation import cut_end

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
