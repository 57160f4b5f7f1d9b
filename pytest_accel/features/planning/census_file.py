"""The file of ``--accel-census``: the outcome of each test of one session. Written as JSON, and checked when read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct, field

from pytest_accel.core import whole_file

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


class DevicesThere(Struct, frozen=True):
    """The devices that a session had for a test."""

    kind: str
    """Kind of the devices; ``none`` if the session had no accelerator."""
    devices: int


class MissingNeed(Struct, frozen=True):
    """The needs of a test that the machine does not meet: fields of :class:`~pytest_accel.core.needs.Needs`."""

    devices: int
    world_size: int
    nodes: int
    ranks_per_node: int
    kind: str
    memory: int
    backend: tuple[str, ...]
    share: float


class Outcome(Struct, frozen=True, omit_defaults=True):
    """The outcome of one test in one session."""

    status: Status
    reason: str | None = None
    """Why the test was skipped, for people."""
    need: MissingNeed | None = None
    """With the status `MISSING`: what the test needs."""
    there: DevicesThere | None = None
    """With the status `MISSING`: what the session had; None if the test needs no device."""

    def __post_init__(self) -> None:
        if self.status is Status.MISSING and self.need is None:
            raise ValueError(f"a test with the status {self.status.value!r} must have a need")


NOT_RUN = Outcome(Status.NOT_RUN)
DESELECTED = Outcome(Status.DESELECTED)


class CensusedSession(Struct, frozen=True):
    """The session of a census."""

    kind: str
    """Kind of the session's devices; ``none`` if it had none."""
    devices: int
    selection: Mapping[str, Any]
    """The options that select tests, by their names, and the arguments of the command line that name tests."""
    complete: bool
    """True if all tests were collected, and every selected one has a verdict or was skipped."""
    collect_only: bool
    exit_status: int


class Census(Struct, frozen=True):
    """The outcomes of the tests of one session."""

    session: CensusedSession
    tests: Mapping[str, Outcome]
    """By node id."""
    skipped_files: Mapping[str, str] = field(default_factory=dict)
    """Reasons of files (or packages) that were skipped as a whole, so that their tests are unknown; by node id."""


class _ListedTest(Outcome, frozen=True, omit_defaults=True, kw_only=True):
    id: str


class _ListedFile(Struct, frozen=True):
    id: str
    reason: str


class _Document(Struct, frozen=True):
    """The JSON document of a census."""

    session: CensusedSession
    tests: list[_ListedTest]
    skipped_files: list[_ListedFile]
    document: str = DOCUMENT
    format: int = FORMAT


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
    tests = [
        _ListedTest(id=nodeid, status=one.status, reason=one.reason, need=one.need, there=one.there)
        for nodeid, one in sorted(census.tests.items())
    ]
    files = [_ListedFile(nodeid, reason) for nodeid, reason in sorted(census.skipped_files.items())]
    document: dict[str, Any] = msgspec.to_builtins(_Document(census.session, tests, files), enc_hook=str)
    return document


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
        found = msgspec.convert(document, _Document)
    except msgspec.ValidationError as error:
        raise CensusError(f"{path}: is no valid census: {error}") from None
    tests = {one.id: Outcome(one.status, one.reason, one.need, one.there) for one in found.tests}
    return Census(found.session, tests, {one.id: one.reason for one in found.skipped_files})
