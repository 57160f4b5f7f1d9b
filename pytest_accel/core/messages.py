"""What the pool, the fork server, the ranks and the drivers say to each other.

Everything here is plain data that pickles. What every test sends are named tuples, which pickle faster than
dataclasses. Times are `clock.monotonic` seconds, which all processes of one machine share.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pytest_accel.core.device import Device, Share

if TYPE_CHECKING:
    from pytest_accel.core.plugin_roles import RoleName

When = Literal["setup", "call", "teardown"]
Location = tuple[str, int | None, str]
"""Of a test, as pytest has it (`pytest.Item.location`)."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What every rank of a session shares: the pytest session that it is part of."""

    args: tuple[str, ...]
    """Command line of the controller, and options for what is to be different in a rank."""
    invocation_dir: str
    sys_path: tuple[str, ...]
    directory: str
    """The session's private folder: sockets, logs and stack files of its ranks."""
    basetemp: str
    """The parent of every rank's base temporary directory."""
    preload: tuple[str, ...]
    """Modules that the fork server imports before it forks."""
    plugins: tuple[str, ...]
    """Installed plugins that were asked for by name, or kept out (``no:NAME``), as ``-p`` has them."""
    roles: tuple[tuple[str, RoleName], ...]
    """The role that the user has given to the plugins of a module or package."""
    markers: tuple[str, ...]
    """Every mark that the controller's session knows, as its ini lines."""
    hidden: tuple[tuple[str, str | None], ...]
    """The mask that hides the session's accelerators: a rank without a lease on some must not use them."""
    distributed: bool
    """Whether xdist distributes the session's tests: its workers are the drivers then."""
    debug: bool = False
    """Whether torch compares the ranks' collectives before it begins them."""
    logs: str | None = None
    """The folder in which the ranks' logs are kept; None: they are not."""
    leaks: str = "warn"
    """What becomes of a test that leaves something behind: ``warn``, ``fail`` or ``off``."""
    kept_processes: tuple[str, ...] = ()
    """Texts in the command lines of processes that tests may leave running."""
    streams: bool = False
    """Whether the driver shows what the ranks write while they write it."""
    server: int = 0
    """The fork server that this is given to: the driver's own is number 0, and removes the folder in the end."""
    far: bool = False
    """Whether it is on another machine than the driver: it then has a folder to itself."""
    clock: float = 0.0
    """Seconds to add to `clock.monotonic` for the driver's, which is another machine's where `far`."""
    bare: bool = False
    """Whether the fork server imports nothing but torch and pytest: neither `preload` nor plugins."""
    shared: bool = True
    """Whether `basetemp` is the driver's, on a file system that it shares with this machine."""
    coverage: str | None = None
    """Settings with which ranks measure coverage (`rank_coverage`); None: they do not."""


def with_options(args: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with `options` behind its own, before a ``--`` that ends them."""
    end = args.index("--") if "--" in args else len(args)
    return (*args[:end], *options, *args[end:])


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """A world to start."""

    world: int
    ranks: int
    grouped: bool
    """Whether the ranks form a distributed world, or are one process that only has devices."""
    backend: str | None
    init: bool
    kind: str
    """The kind of device that the ranks run on."""
    kind_argument: str | None
    """What the session said of the kind (the `8` of ``sim:8``)."""
    devices: tuple[Device, ...]
    """All devices of the lease, rank by rank; one that several ranks share is there several times."""
    devices_per_rank: int
    visible: Literal["world", "rank"]
    env: tuple[tuple[str, str], ...]
    share: Share | None = None
    """What each rank has of each of its devices; None: all."""
    servers: tuple[int, ...] = ()
    """The fork server of each rank; empty: the driver's own for all."""
    nodes: tuple[int, ...] = ()
    """The machine of each rank, of which the driver's is number 0; empty: that for all."""
    addresses: tuple[str, ...] = ()
    """That of each rank's machine, as the others reach it; empty: all are on one."""
    secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False, compare=False)
    """Signs what the ranks keep in their store (`signed_store`)."""

    def server_of(self, rank: int) -> int:
        """The fork server that `rank` comes from."""
        return self.servers[rank] if self.servers else 0

    def node_of(self, rank: int) -> int:
        """The machine of `rank`, by its number in the session."""
        return self.nodes[rank] if self.nodes else 0

    def is_far(self, rank: int) -> bool:
        """Whether `rank` is on another machine than the driver."""
        return bool(self.nodes and self.nodes[rank])

    @property
    def near(self) -> bool:
        """Whether all ranks are on the driver's machine, and so can be given ways to each other (`peers`)."""
        return not any(self.nodes)

    @property
    def parted(self) -> bool:
        """Whether its ranks come from several fork servers, which are given the ranks' ways to each other."""
        return self.near and len(set(self.servers)) > 1

    @property
    def node_count(self) -> int:
        """How many machines its ranks are on."""
        return len(set(self.nodes)) or 1

    def node_rank(self, rank: int) -> int:
        """The number of `rank`'s machine among those of the world."""
        return sorted(set(self.nodes)).index(self.nodes[rank]) if self.nodes else 0

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The ranks on the machine of `rank`, itself included: its place among them is its local rank."""
        if not self.nodes:
            return tuple(range(self.ranks))
        return tuple(other for other in range(self.ranks) if self.nodes[other] == self.nodes[rank])

    def devices_of(self, rank: int) -> tuple[Device, ...]:
        """The devices that are `rank`'s own."""
        first = rank * self.devices_per_rank
        return self.devices[first : first + self.devices_per_rank]

    def seen_by(self, rank: int) -> tuple[Device, ...]:
        """The devices that `rank`'s mask shows: its own, or the world's that are on its machine."""
        if self.visible == "rank":
            return self.devices_of(rank)
        return tuple(dict.fromkeys(device for other in self.neighbours(rank) for device in self.devices_of(other)))


# Controller to fork server


@dataclass(frozen=True, slots=True)
class StartWorld:
    """Behind one of a parted world come the descriptors of `peers.connect`."""

    spec: WorldSpec
    port: int | None = None
    """That of the world's store, where another server holds it."""


@dataclass(frozen=True, slots=True)
class KillWorld:
    world: int
    after: float = 0.0
    """Seconds from now; the ranks have that long to end by themselves."""


@dataclass(frozen=True, slots=True)
class Preload:
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeepOut:
    """Modules that ranks must import themselves: a server that has imported one of them says so and ends."""

    modules: tuple[str, ...]


# Fork server to controller


@dataclass(frozen=True, slots=True)
class WorldStarted:
    world: int
    pids: tuple[int, ...]
    """Of the ranks that this server has forked, in their order."""
    port: int | None = None
    """That of the world's store, where the world has one."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    world: int
    text: str


@dataclass(frozen=True, slots=True)
class RankExited:
    world: int
    rank: int
    status: int
    """Exit code, or the signal's number negated (as `subprocess` has it)."""


@dataclass(frozen=True, slots=True)
class ServerNote:
    """Something that a person who asked for ``-v`` wants to know."""

    text: str


@dataclass(frozen=True, slots=True)
class ImportedAhead:
    """The answer to :class:`KeepOut` of a server that has imported `module`."""

    module: str


# Driver to rank


class NodeRef(NamedTuple):
    """A test as a rank finds it: the file to collect and the names below it."""

    path: str
    names: tuple[str, ...]


class RunTest(NamedTuple):
    serial: int
    node: NodeRef
    location: Location
    """The test's, which the driver has looked up already: a rank that did would look at the file once a test."""
    next: NodeRef | None
    """The test that this world runs next, as far as the driver knows."""
    last: bool = False
    """No test follows in this world: session fixtures end with this test."""
    ahead: bool = False
    """Begin when every rank has passed the test before; if one has not, only when told so again (see `peers`)."""


@dataclass(frozen=True, slots=True)
class Retire:
    """End the session: session fixtures are torn down, then the process exits with :data:`RETIRED`."""


RETIRED = 93
"""Exit status of a rank that has ended its session as it was told. Not 0, with which anything may exit."""


# Rank to driver


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Broken:
    """The rank could not start."""

    text: str


@dataclass(frozen=True, slots=True)
class Astray:
    """A process that the test forked has left the test, and would have gone on as a second rank of this number."""

    text: str
    phase: When
    """The phase in which it has left the test."""


class PhaseReport(NamedTuple):
    serial: int
    when: When
    report: dict[str, Any]
    """The pytest report of this phase, as ``pytest_report_to_serializable`` gives it."""
    at: float
    exception: ExceptionSketch | None = None


@dataclass(frozen=True, slots=True)
class WantsTerminal:
    """A debugger is to start; the rank waits for the answer, which comes on a connection of its own (see `lending`)."""

    method: str
    """pytest's word for how: ``set_trace``, ``runcall``, ``post_mortem``."""


@dataclass(frozen=True, slots=True)
class GivesTerminal:
    """The test goes on without the debugger."""


@dataclass(frozen=True, slots=True)
class ExitRequest:
    """The test asked for the end of the whole session (``pytest.exit``)."""

    serial: int
    reason: str
    returncode: int | None


class ExtraReport(NamedTuple):
    """A report that is not a phase's: a subtest's."""

    serial: int
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExceptionSketch:
    """Enough of an exception to stand in for it where marks and plugins look at its type and text."""

    module: str
    qualname: str
    text: str
    cause: ExceptionSketch | None = None
    peer: int | None = None
    """The rank whose failure it repeats; None: no other's."""
    own: bool = False
    """Where it repeats one: whether the rank has failed in the same way itself."""


@dataclass(frozen=True, slots=True)
class WarningSketch:
    message: str
    category_module: str
    category: str
    filename: str
    lineno: int
    location: tuple[str, int, str] | None


class Finished(NamedTuple):
    """The last message of a test: what it left behind in this rank."""

    serial: int
    collectives: dict[str, tuple[tuple[int, ...], int]]
    """For each process group of the rank: its members' global ranks, and how many collectives it has issued."""
    warnings: tuple[WarningSketch, ...] = ()
    stale: str | None = None
    """Text of an error in tearing down what an earlier test had left set up."""
    harm: str | None = None
    """Why this world should not run another test."""
    left: tuple[str, ...] = ()
    """What the test has left behind in the rank, and what has become of it since."""
    groups: int = 0
    """How many process groups torch has numbered in the rank."""
    properties: Mapping[str, Any] = MappingProxyType({})
    word: int | None = None
    """What the rank has told its peers (see `peers`); None: that this test is nothing to go on from."""
    worn: bool = False
    """Whether this world should not run another test, but may end in good order."""
