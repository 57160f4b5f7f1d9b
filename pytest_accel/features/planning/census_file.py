"""The file of ``--accel-census``: the outcome of each test of one session. Written as JSON, and checked when read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from pytest_accel.core import whole_file
from pytest_accel.core.needs import Needs

DOCUMENT = "pytest-accel census"
FORMAT = 1
"""Version of the JSON document. Increased when a key is removed or changes its meaning, not when one is added."""


class CensusError(Exception):
    """Raised for a file that cannot be read as a census, or written. The message names the file."""


class Status(Enum):
    """The status of a test. If a session has run a test several times, the status that comes first here counts."""

    FAILED = "failed"
    ERROR = "error"
    """Setup or teardown failed."""
    XPASSED = "xpassed"
    PASSED = "passed"
    XFAILED = "xfailed"
    MISSING = "missing hardware"
    """Skipped, or failed because of ``--accel-strict``, since the machine can never run the test."""
    SKIPPED = "skipped"
    """Skipped by the test itself, a fixture or a mark; also an expected failure that came before the test's call."""
    NOT_RUN = "not run"
    """Selected, but without a verdict when the session ended."""
    DESELECTED = "deselected"

    @property
    def has_run(self) -> bool:
        """True if the test was started and has a verdict."""
        return self in _RUN

    @property
    def strength(self) -> int:
        """Number by which several runs of one test are compared: the largest counts."""
        return -_STRONGEST_FIRST.index(self)


_STRONGEST_FIRST = tuple(Status)
_RUN = (Status.FAILED, Status.ERROR, Status.XPASSED, Status.PASSED, Status.XFAILED)


@dataclass(frozen=True, slots=True)
class DevicesThere:
    """The devices that a session had for a test."""

    kind: str
    """Kind of the devices; ``none`` if the session had no accelerator."""
    devices: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one test in one session."""

    status: Status
    reason: str | None = None
    """Why the test was skipped, for people."""
    need: Needs | None = None
    """With the status `MISSING`: what the test needs."""
    there: DevicesThere | None = None
    """With the status `MISSING`: what the session had; None if the test needs no device."""


NOT_RUN = Outcome(Status.NOT_RUN)
DESELECTED = Outcome(Status.DESELECTED)


@dataclass(frozen=True, slots=True)
class Census:
    """The outcomes of the tests of one session."""

    kind: str
    """Kind of the session's devices; ``none`` if it had none."""
    devices: int
    selection: Mapping[str, object]
    """The options that select tests, by their names, and the arguments of the command line that name tests."""
    complete: bool
    """True if all tests were collected, and every selected one has a verdict or was skipped."""
    collect_only: bool
    exit_status: int
    tests: Mapping[str, Outcome]
    """By node id."""
    skipped_files: Mapping[str, str] = field(default_factory=dict)
    """Reasons of files (or packages) that were skipped as a whole, so that their tests are unknown; by node id."""


def check_path(path: str) -> None:
    """Raise :class:`CensusError` unless a census can be written to `path`; create its folder, remove an old census."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise CensusError(f"{path} is not a regular file")
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise CensusError(f"{path} cannot be written: the folder {folder}: {error.strerror}") from None
    try:
        whole_file.check_folder(path)
        if os.path.exists(path):
            os.unlink(path)
    except OSError as error:
        raise CensusError(f"{path} cannot be written: {error.strerror}") from None


def write(path: str, census: Census) -> None:
    """Write `census` to `path`, whole or not at all. Raise :class:`CensusError` if that fails."""
    # Escaped: an id may have characters that UTF-8 cannot encode, of a file name that is not UTF-8.
    text = json.dumps(as_json(census), indent=1, ensure_ascii=True, default=str)
    try:
        whole_file.write(path, f"{text}\n")
    except OSError as error:
        raise CensusError(f"{path} could not be written: {error.strerror}") from None


def as_json(census: Census) -> dict[str, Any]:
    """Return the JSON document of `census`, with tests and files in the order of their ids."""
    return {
        "document": DOCUMENT,
        "format": FORMAT,
        "session": {
            "kind": census.kind,
            "devices": census.devices,
            "selection": dict(census.selection),
            "complete": census.complete,
            "collect_only": census.collect_only,
            "exit_status": census.exit_status,
        },
        "tests": [_test_as_json(nodeid, outcome) for nodeid, outcome in sorted(census.tests.items())],
        "skipped_files": [{"id": nodeid, "reason": reason} for nodeid, reason in sorted(census.skipped_files.items())],
    }


def _test_as_json(nodeid: str, outcome: Outcome) -> dict[str, Any]:
    test: dict[str, Any] = {"id": nodeid, "status": outcome.status.value}
    if outcome.reason is not None:
        test["reason"] = outcome.reason
    if outcome.need is not None:
        test["need"] = {name: value for name, value in outcome.need._asdict().items() if name in _NEED_TYPES}
    if outcome.there is not None:
        test["there"] = asdict(outcome.there)
    return test


def read(path: str) -> Census:
    """Return the census in the file `path`. Raise :class:`CensusError` if there is none that this release can read."""
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read())
    except OSError as error:
        raise CensusError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CensusError(f"{path}: is no census of --accel-census, since it is no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("document") != DOCUMENT:
        raise CensusError(f'{path}: is no census of --accel-census, which has "document": "{DOCUMENT}"')
    if document.get("format") != FORMAT:
        raise CensusError(f"{path}: the census has format {document.get('format')!r}; this release reads {FORMAT}")
    try:
        return _census(document)
    except _WrongValueError as error:
        raise CensusError(f"{path}: is no valid census: {error}") from None


class _WrongValueError(Exception):
    """Raised for a value that a census cannot have. The message says where it is and what is allowed."""


def _census(document: dict[str, Any]) -> Census:
    session = _take(document, "session", dict, "the document")
    tests: dict[str, Outcome] = {}
    for index, test in enumerate(_take(document, "tests", list, "the document")):
        nodeid, outcome = _test(test, f"tests[{index}]")
        tests[nodeid] = outcome
    skipped_files: dict[str, str] = {}
    for index, file in enumerate(_take(document, "skipped_files", list, "the document")):
        where = f"skipped_files[{index}]"
        skipped_files[_take(file, "id", str, where)] = _take(file, "reason", str, where)
    return Census(
        kind=_take(session, "kind", str, "session"),
        devices=_take(session, "devices", int, "session"),
        selection=_take(session, "selection", dict, "session"),
        complete=_take(session, "complete", bool, "session"),
        collect_only=_take(session, "collect_only", bool, "session"),
        exit_status=_take(session, "exit_status", int, "session"),
        tests=tests,
        skipped_files=skipped_files,
    )


def _test(test: object, where: str) -> tuple[str, Outcome]:
    nodeid, word = _take(test, "id", str, where), _take(test, "status", str, where)
    assert isinstance(test, dict)
    try:
        status = Status(word)
    except ValueError:
        allowed = ", ".join(status.value for status in Status)
        raise _WrongValueError(f"{where}: status must be one of {allowed}, got {word!r}") from None
    reason = _take(test, "reason", str, where) if "reason" in test else None
    need = there = None
    if "need" in test:
        need = _need(_take(test, "need", dict, where), f"{where}: need")
    elif status is Status.MISSING:
        raise _WrongValueError(f"{where}: a test with the status {status.value!r} must have a need")
    if "there" in test:
        found = _take(test, "there", dict, where)
        there = DevicesThere(
            _take(found, "kind", str, f"{where}: there"), _take(found, "devices", int, f"{where}: there")
        )
    return nodeid, Outcome(status, reason, need, there)


_NEED_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("devices", "world_size", "nodes", "ranks_per_node", "memory"), int),
    "kind": str,
    "backend": (list, tuple),
    "share": (int, float),
}
"""The fields of a need that the file has, with the types of their values."""


def _need(found: dict[str, Any], where: str) -> Needs:
    """Return the need in `found`. Keys that a later release has added are ignored."""
    values = {name: _take(found, name, allowed, where) for name, allowed in _NEED_TYPES.items()}
    return Needs(marked=True, fits=False, **{**values, "backend": tuple(map(str, values["backend"]))})


def _take(found: object, key: str, allowed: type | tuple[type, ...], where: str) -> Any:
    """Return the value of `key` in `found`, which must be an object with a value of one of the types `allowed`."""
    if not isinstance(found, dict):
        raise _WrongValueError(f"{where} must be an object, got {found!r:.80}")
    value = found.get(key)
    kinds = allowed if isinstance(allowed, tuple) else (allowed,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise _WrongValueError(f"{where}: {key} must be of type {names}, got {value!r:.80}")
    return value
