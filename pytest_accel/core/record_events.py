"""The events of a session's record (``--accel-record``).

Each event is one line of the file: a JSON object with its name (``event``), the fields below, and those of
:class:`Stamp`. Times are seconds since the epoch. A field that has its default value is left out. Later versions of the
plugin may add fields and events; `SCHEMA` changes if a field is removed or changes its meaning.

msgspec makes an event and its line in a tenth of the time of a dataclass and json: each test has at least four events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct, field

SCHEMA = 1
"""Version of the events."""
Moment = Annotated[float, Meta(ge=0, le=1e11)]
"""Seconds since the epoch, until the year 5138: later times are too large for some functions.

msgspec checks this when it reads an event.
"""


class Stamp(Struct, frozen=True, omit_defaults=True):
    """The fields that each event has in addition to its own."""

    at: Moment
    """Time at which the event was recorded."""
    host: str
    """Name of the machine of the process that recorded the event: the controller."""
    pid: int
    """Id of that process."""


class SessionStarted(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """A session has started. The first event of each session."""

    schema: int
    session: str
    """A random id."""
    version: str
    """The plugin's version."""
    command: tuple[str, ...]
    """The arguments of pytest."""
    root: str
    """pytest's rootdir."""
    shard: tuple[int, int] | None = None
    """The part that the session runs, and the number of parts (``--accel-shard``)."""


class PoolOpened(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """The first marked tests have been found, and the session can lease devices and CPU slots from now on."""

    slots: int
    """The number of ranks that may use the CPU at once."""
    kind: str | None = None
    """Kind of the session's devices; None if it has none."""


class MachineFound(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """A machine of the session. Machine 0 has no event in a session without a launcher, since there is no other."""

    machine: int
    """Its number; 0 is the controller's machine."""
    name: str


class DeviceFound(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """A device that tests of the session can use."""

    device: str
    """Its id, which is unique on its machine."""
    kind: str
    index: int
    """The number that the management library gives it."""
    name: str
    machine: int = 0
    memory: int | None = None
    """Bytes; None if unknown."""


class TestStarted(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """A test has started."""

    __test__ = False  # pytest would collect the class.

    test: str
    """Node id."""
    worker: str = ""
    """Name of xdist's worker; empty without xdist."""


class WorldRequested(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """A test has requested a world. A :class:`WorldAcquired` or :class:`RequestEnded` follows."""

    request: int
    test: str
    about: str
    """The world in a few words."""


class RequestWaits(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """A request could not be granted at once."""

    request: int
    why: str
    """The test, the devices or CPU slots that it waits for, and their holders if they are known."""


class RequestEnded(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """A request has ended without a world."""

    request: int
    why: str


class RankPlace(Struct, frozen=True, omit_defaults=True):
    """Machine and devices of one rank."""

    machine: int = 0
    devices: tuple[str, ...] = ()
    """Ids."""
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Fraction of each device that the rank has."""


class WorldStarting(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """The leases of a request have been granted, and the processes of a new world are being started."""

    world: int
    request: int
    about: str
    """The world in a few words."""
    ranks: tuple[RankPlace, ...]


class WorldReady(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """The processes of a world have started."""

    world: int
    pids: tuple[int, ...]
    """The process id of each rank."""


class WorldAcquired(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """A driver has got a world for its request. It uses the world for this test and maybe later ones."""

    world: int
    request: int
    reused: bool = False
    """True if another request had the world before."""


class WorldReturned(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """A driver has returned a world: it is idle, or a :class:`WorldEnding` follows."""

    world: int


class WorldEnding(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """The ranks of a world have been told to end, or are being killed."""

    world: int
    why: str
    killed: bool = False


class WorldGone(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """All processes of a world have ended, and its leases have been returned."""

    world: int


class CollectiveCall(Struct, frozen=True, omit_defaults=True):
    """A collective that a rank has issued, from torch's flight recorder."""

    name: str
    """The backend and the operation, such as ``gloo:all_reduce``."""
    number: int
    """Its number in its process group, from 1."""
    group: str
    """Name of the process group."""
    issued: Moment
    stop: Moment = 0.0
    """Time at which it was found to have ended; 0 if unknown, as for all collectives of gloo."""


class RankPhase(Struct, frozen=True, omit_defaults=True):
    """One phase of a test in one rank."""

    rank: int
    ending: str
    """passed, failed, skipped, died, hung, stopped (after another rank had failed or ended) or unstarted."""
    start: Moment = 0.0
    """0 if unknown."""
    stop: Moment = 0.0
    """The end of the phase, or that of the rank."""
    collectives: tuple[CollectiveCall, ...] = ()
    """The last collectives of the phase, of torch 2.8 or newer."""


class PhaseReported(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """pytest has reported a phase of a test."""

    test: str
    when: str
    """setup, call or teardown; ``???`` if the process that ran the test has crashed."""
    outcome: str
    """passed, failed or skipped, or the word of another plugin, such as rerun."""
    start: Moment
    stop: Moment
    worker: str = ""
    """Name of xdist's worker; empty without xdist."""
    process: int = 0
    """Id of the process that ran the test, or waited for its ranks; 0 if unknown."""
    file: str = ""
    """File of the test, relative to rootdir."""
    line: int | None = None
    """Line of the test, from 1."""
    world: int = 0
    """The world in which the test ran; 0 for a test without marks, and for one that did not get a world."""
    ranks: tuple[RankPhase, ...] = ()
    xfail: str | None = None
    """The reason of an expected failure, whether it failed or not."""
    skip: str | None = None
    """The reason of a skip."""
    missing: str | None = None
    """The missing hardware, if that is the reason."""
    headline: str = ""
    """The line of the short summary, for a phase that did not pass."""
    failure: str = ""
    """The text of a failure."""
    place: tuple[str, int] | None = None
    """File and line of a failure."""
    failed_ranks: tuple[int, ...] = ()
    """The ranks that the failure is about; empty if it names none."""
    output: Mapping[str, str] = field(default_factory=dict)
    """Captured output by the name of its section, for a failure; long text is shortened."""
    output_sizes: Mapping[str, int] = field(default_factory=dict)
    """Characters of captured output by the name of its section."""
    peaks: Mapping[str, int] = field(default_factory=dict)
    """Peak of device memory in bytes, by rank."""
    launched: int = 0
    """The ranks that the test had started so far with the fixture ``launch``: the most that one call started."""


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


class DevicesThere(Struct, frozen=True):
    """The devices that a session had for a test."""

    kind: str
    """Kind of the devices; ``none`` if the session had no accelerator."""
    devices: int


class MissingNeed(Struct, frozen=True):
    """The needs of a test that the machine does not meet, in the words of ``--accel-select``."""

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


class TestsCounted(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """The session has ended, and this is what became of each test. Only in the file of ``--accel-record``."""

    __test__ = False  # pytest would collect the class.

    selection: Mapping[str, Any]
    """The options that select tests, by their names, and the arguments of the command line that name tests."""
    complete: bool
    """True if all tests were collected, and every selected one has a verdict or was skipped."""
    collect_only: bool
    tests: Mapping[str, Outcome]
    """By node id, without the group that xdist may append; ``#2``, ``#3``, ... follow equal ids of later tests."""
    skipped_files: Mapping[str, str] = field(default_factory=dict)
    """Reasons of files (or packages) that were skipped as a whole, so that their tests are unknown; by node id."""


class SessionFinished(Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """The session has ended. A record without it is that of a session that was killed."""

    status: int
    """pytest's exit status."""


Event = (
    SessionStarted
    | PoolOpened
    | MachineFound
    | DeviceFound
    | TestStarted
    | WorldRequested
    | RequestWaits
    | RequestEnded
    | WorldStarting
    | WorldReady
    | WorldAcquired
    | WorldReturned
    | WorldEnding
    | WorldGone
    | PhaseReported
    | TestsCounted
    | SessionFinished
)


class Recorder(Protocol):
    """The receiver of events."""

    def __call__(self, event: Event) -> None:
        """Record `event`. Never raise."""


@dataclass(frozen=True, slots=True)
class Recorders:
    """A :class:`Recorder` that passes each event on to any number of others."""

    receivers: tuple[Recorder, ...] = ()

    def __call__(self, event: Event) -> None:
        for receive in self.receivers:
            receive(event)
