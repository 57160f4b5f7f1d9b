"""Messages between the pool, the fork server, the ranks and the drivers, and the specs of sessions and worlds.

Everything here is plain data that can be pickled. The messages that are sent for every test are named tuples, which
pickle faster than dataclasses. Times are in seconds of `clock.monotonic`, which all processes of one machine share.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pytest_accel.core.device import Device, Share
from pytest_accel.core.rank_exit import RankExit

if TYPE_CHECKING:
    from pytest_accel.core.plugin_roles import RoleName

When = Literal["setup", "call", "teardown"]
Location = tuple[str, int | None, str]
"""File, line and name of a test, as in `pytest.Item.location`."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Settings of the pytest session that all ranks share."""

    args: tuple[str, ...]
    """Command line of the controller, with additional options for the ranks."""
    invocation_dir: str
    sys_path: tuple[str, ...]
    directory: str
    """The session's private folder: sockets, logs and stack files of its ranks."""
    basetemp: str
    """The parent of every rank's base temporary directory."""
    preload: tuple[str, ...]
    """Modules that the fork server imports before it forks."""
    plugins: tuple[str, ...]
    """Values of ``-p``: installed plugins that are enabled, or disabled (``no:NAME``)."""
    roles: tuple[tuple[str, RoleName], ...]
    """Roles that the user has given to plugins, by module or package."""
    markers: tuple[str, ...]
    """All registered marks of the controller's session, as lines of the ini option ``markers``."""
    hidden: tuple[tuple[str, str | None], ...]
    """Mask that hides the session's accelerators, for ranks that have no lease on any."""
    distributed: bool
    """True if xdist distributes the tests; its workers then are the drivers."""
    debug: bool = False
    """True if torch compares the ranks' collectives before it starts them."""
    logs: str | None = None
    """Folder in which the ranks' logs are kept; None: they are not kept."""
    leaks: str = "warn"
    """Reaction to a test that leaks resources: ``warn``, ``fail`` or ``off``."""
    kept_processes: tuple[str, ...] = ()
    """Parts of command lines: tests may leave processes running whose command line contains one of them."""
    streams: bool = False
    """True if the driver shows the ranks' output live."""
    server: int = 0
    """Number of the fork server that receives this spec. Number 0 is the driver's own, and removes `directory`."""
    far: bool = False
    """True if the fork server is on another machine than the driver; `directory` then is its own."""
    clock: float = 0.0
    """Seconds to add to `clock.monotonic` to get the driver's, whose clock is another one if `far`."""
    bare: bool = False
    """True if the fork server preloads only torch and pytest: neither `preload` nor plugins."""
    shared: bool = True
    """True if `basetemp` is the driver's, on a file system that both machines share."""
    coverage: str | None = None
    """Settings with which ranks measure coverage (`pytest_accel.rank.coverage`); None: they do not."""


def with_options(args: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """Return the command line `args` with `options` at its end, or before ``--`` if it has one."""
    end = args.index("--") if "--" in args else len(args)
    return (*args[:end], *options, *args[end:])


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Description of a world: its ranks, their devices and their machines."""

    world: int
    ranks: int
    grouped: bool
    """True if the ranks form a distributed world; False: one process that only has devices."""
    backend: str | None
    init: bool
    kind: str
    """The kind of device that the ranks run on."""
    kind_argument: str | None
    """Argument of the kind in ``--accel`` (the `8` of ``sim:8``), or None."""
    devices: tuple[Device, ...]
    """All devices of the lease, rank by rank. A device that several ranks share occurs several times."""
    devices_per_rank: int
    visible: Literal["world", "rank"]
    env: tuple[tuple[str, str], ...]
    share: Share | None = None
    """Share that each rank has of each of its devices; None: whole devices."""
    servers: tuple[int, ...] = ()
    """Number of each rank's fork server; empty: the driver's own server forks all ranks."""
    nodes: tuple[int, ...] = ()
    """Number of each rank's node; 0 is the driver's. Empty: all ranks are on the driver's node."""
    addresses: tuple[str, ...] = ()
    """Network address of each rank's node; empty: all ranks are on one node."""
    secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False, compare=False)
    """Key that authenticates the ranks' values in their store (`pytest_accel.rank.signed_store`)."""

    def server_of(self, rank: int) -> int:
        """Return the number of the fork server of `rank`."""
        return self.servers[rank] if self.servers else 0

    def node_of(self, rank: int) -> int:
        """Return the number, in the session, of the node of `rank`."""
        return self.nodes[rank] if self.nodes else 0

    def is_far(self, rank: int) -> bool:
        """Return whether `rank` is on another node than the driver."""
        return bool(self.nodes and self.nodes[rank])

    @property
    def near(self) -> bool:
        """True if all ranks are on the driver's node, so that socket pairs can connect them (`rank.run_ahead`)."""
        return not any(self.nodes)

    @property
    def parted(self) -> bool:
        """True if the ranks, all on the driver's node, come from several fork servers.

        The servers then have to receive the sockets that connect the ranks.
        """
        return self.near and len(set(self.servers)) > 1

    @property
    def node_count(self) -> int:
        """Number of nodes that the ranks are on."""
        return len(set(self.nodes)) or 1

    def node_rank(self, rank: int) -> int:
        """Return the position of `rank`'s node among the nodes of the world."""
        return sorted(set(self.nodes)).index(self.nodes[rank]) if self.nodes else 0

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the node of `rank`, including itself. Its position among them is its local rank."""
        if not self.nodes:
            return tuple(range(self.ranks))
        return tuple(other for other in range(self.ranks) if self.nodes[other] == self.nodes[rank])

    def devices_of(self, rank: int) -> tuple[Device, ...]:
        """Return the devices that belong to `rank`."""
        first = rank * self.devices_per_rank
        return self.devices[first : first + self.devices_per_rank]

    def seen_by(self, rank: int) -> tuple[Device, ...]:
        """Return the devices that the mask of `rank` shows: its own, or all of the world on its node."""
        if self.visible == "rank":
            return self.devices_of(rank)
        return tuple(dict.fromkeys(device for other in self.neighbours(rank) for device in self.devices_of(other)))


# Controller to fork server


@dataclass(frozen=True, slots=True)
class StartWorld:
    """Start the ranks of `spec` that belong to this server.

    If `spec` is `parted`, the descriptors of `run_ahead.connect` follow the message.
    """

    spec: WorldSpec
    port: int | None = None
    """Port of the world's store, if another server has created it."""


@dataclass(frozen=True, slots=True)
class KillWorld:
    """Kill the ranks of `world`."""

    world: int
    after: float = 0.0
    """Seconds until the ranks are killed, in which they may exit by themselves."""


@dataclass(frozen=True, slots=True)
class Preload:
    """Import `modules`, so that ranks need not."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeepOut:
    """Exit, after an :class:`ImportedAhead`, if one of `modules` has been preloaded.

    Ranks must import these modules themselves. A server with running worlds ignores the message.
    """

    modules: tuple[str, ...]


# Fork server to controller


@dataclass(frozen=True, slots=True)
class WorldStarted:
    """The ranks of `world` that belong to this server have been forked."""

    world: int
    pids: tuple[int, ...]
    """Pids of the ranks that this server has forked, in the order of the ranks."""
    port: int | None = None
    """Port of the world's store, or None if it has no store."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The world could not be started; `text` is the reason."""

    world: int
    text: str


@dataclass(frozen=True, slots=True)
class RankExited:
    """The process of a rank has exited."""

    world: int
    rank: int
    exit: RankExit


@dataclass(frozen=True, slots=True)
class ServerNote:
    """A note that is shown with ``-v``."""

    text: str


@dataclass(frozen=True, slots=True)
class ImportedAhead:
    """The answer to :class:`KeepOut` of a server that has imported `module`."""

    module: str


# Driver to rank


class NodeRef(NamedTuple):
    """A reference to a test: the file to collect, and the names of its nodes in that file."""

    path: str
    names: tuple[str, ...]


class RunTest(NamedTuple):
    """Run a test."""

    serial: int
    node: NodeRef
    location: Location
    """Location of the test. The driver sends it because a rank would access the file for every test to find it."""
    next: NodeRef | None
    """The test that this world is expected to run next."""
    last: bool = False
    """True if no test follows in this world, so that session fixtures are torn down after this test."""
    ahead: bool = False
    """True if the driver sends the test before the previous one has ended (see `pytest_accel.rank.run_ahead`).

    The ranks start it once all of them have passed the previous test; else they wait for the driver's next message.
    """


@dataclass(frozen=True, slots=True)
class Retire:
    """Finish the session: tear down session fixtures, and exit with :data:`RETIRED`."""


RETIRED = 93
"""Exit status of a rank after :class:`Retire`. It is not 0, since any code in the rank may exit with 0."""


# Rank to driver


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank can run tests."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The rank cannot run tests, or cannot find the requested one; `text` is the reason."""

    text: str


@dataclass(frozen=True, slots=True)
class Astray:
    """A process that the test forked has left the test's code, and would have continued as a copy of the rank."""

    text: str
    phase: When
    """The phase in which the process left the test's code."""


class PhaseReport(NamedTuple):
    """The report of one phase of a test."""

    serial: int
    when: When
    report: dict[str, Any]
    """The pytest report of this phase, as ``pytest_report_to_serializable`` returns it."""
    at: float
    exception: ExceptionSketch | None = None


@dataclass(frozen=True, slots=True)
class WantsTerminal:
    """A debugger is about to start. The rank waits for the driver's answer, which arrives on a separate connection.

    See `pytest_accel.rank.debugger`.
    """

    method: str
    """pytest's name for the way the debugger is started: ``set_trace``, ``runcall``, ``post_mortem``."""


@dataclass(frozen=True, slots=True)
class GivesTerminal:
    """The debugger has finished, and the test continues."""


@dataclass(frozen=True, slots=True)
class ExitRequest:
    """The test has requested the end of the whole session (``pytest.exit``)."""

    serial: int
    reason: str
    returncode: int | None


class ExtraReport(NamedTuple):
    """A report that does not belong to a phase, such as that of a subtest."""

    serial: int
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExceptionSketch:
    """Type, text and cause of an exception, enough for marks and plugins that examine it in the driver."""

    module: str
    qualname: str
    text: str
    cause: ExceptionSketch | None = None
    peer: int | None = None
    """The rank whose failure this exception repeats; None: it is a failure of its own."""
    own: bool = False
    """If `peer` is set: True if this rank has failed in the same way itself."""


@dataclass(frozen=True, slots=True)
class WarningSketch:
    """A recorded warning, in a form that can always be pickled."""

    message: str
    category_module: str
    category: str
    filename: str
    lineno: int
    location: tuple[str, int, str] | None


class Finished(NamedTuple):
    """The last message of a test: its results beyond the reports, and what it has leaked in this rank."""

    serial: int
    collectives: dict[str, tuple[tuple[int, ...], int]]
    """For each process group of the rank: the global ranks of its members, and its number of issued collectives."""
    warnings: tuple[WarningSketch, ...] = ()
    stale: str | None = None
    """Text of an error in the teardown of fixtures that an earlier test had left set up; None: no error."""
    harm: str | None = None
    """Why this world must not run another test; None: no reason."""
    left: tuple[str, ...] = ()
    """Resources that the test has leaked in the rank, and what was done about them, as lines of text."""
    groups: int = 0
    """Number of process groups that have been created in the rank, by torch's counter."""
    properties: Mapping[str, Any] = MappingProxyType({})
    word: int | None = None
    """Value that the rank has sent to its peers (see `run_ahead.word`).

    None: the test did not pass cleanly, so the ranks must not start the next test without the driver.
    """
    worn: bool = False
    """True if this world must not run another test but can still shut down cleanly."""
