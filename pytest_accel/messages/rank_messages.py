"""Messages between a driver and a rank, and why a rank has ended, which `verdict.sentences` puts into words.

Times are in seconds of the driver's `clock.monotonic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple

from msgspec import Struct, field

from pytest_accel.core.node_refs import NodeRef, TestFamily
from pytest_accel.core.record_events import CollectiveCall
from pytest_accel.core.signals import is_crash

When = Literal["setup", "call", "teardown"]

# Driver to rank


class CollectFile(Struct, frozen=True, tag=True):
    """Collect the file of the test `node` unless that has been done, and find the test. The answer is `Collected`."""

    node: NodeRef
    digest: bytes = b""
    """Digest of the file when the driver has collected it; empty if it is not known."""
    devices: int | None = None
    """Number of the session's devices of the test's kind; None if there is no such kind."""
    project_marks: frozenset[str] = frozenset()
    """The names of the plugin's marks that are the project's own in this session (`MarkOwners`)."""


class Command(Enum):
    """A request without arguments."""

    PREPARE = "prepare"
    """Prepare for tests: verify the devices, and form the process group. The answer is `CannotRun` or None.

    Ranks wait for each other in this. The driver therefore sends it only if every rank has collected the test's file.
    """
    TEAR_DOWN = "tear down"
    """Tear down all fixtures that are still set up: no test follows in this world. The answer is `TornDown`."""
    RETIRE = "retire"
    """Finish the session: tear down session fixtures, and exit with :data:`RETIRED`."""


class RunTest(Struct, frozen=True, tag=True):
    """Run all phases of a test."""

    serial: int
    node: NodeRef
    location: tuple[str, int | None, str]
    """`pytest.Item.location` of the test. The driver sends it because a rank would access the file to find it."""
    next: NodeRef | None
    """The test that this world is expected to run next."""
    last: bool
    """True if no test follows in this world, so that session fixtures are torn down after this test."""
    names: tuple[str, str]
    """Name and node id of the test in the driver. Several tests there may be the same test in a rank."""


DriverRequest = CollectFile | RunTest | Command

RETIRED = 93
"""Exit status of a rank after `RETIRE`. It is not 0, since any code in the rank may exit with 0."""
FAILED_BY_HOOK = 94
"""Exit status of a rank after `RETIRE` if a hook has made its session fail, and none of its tests has."""


# Rank to driver


class Collected(Struct, frozen=True, tag=True):
    """The answer to `CollectFile`."""

    families: frozenset[TestFamily] = frozenset()
    """The families of tests that the rank has collected from the file."""
    unexpected: frozenset[NodeRef] = frozenset()
    """The tests of the file that have ``xfail`` marks, but none that applies in the rank."""
    problem: CannotRun | None = None
    """The reason why the rank cannot run the test, although it may run others; None if it can run it."""
    prepared: bool = True
    """False if the rank needs `PREPARE` before its first test."""


class CannotRun(Struct, frozen=True, tag=True):
    """The rank cannot run any test; `text` is the reason."""

    text: str
    headline: str = ""
    """The cause in one line, if the rank has recognized it; with it, the output of the rank is not shown."""


class ForkReturned(Struct, frozen=True, tag=True):
    """A process that the test forked has returned from the test, and would have continued as a copy of the rank."""

    text: str
    phase: When
    """The phase in which the process returned."""


class PhaseReport(Struct, frozen=True, tag=True):
    """The report of one phase of a test, or an additional report in it, such as the report of a subtest."""

    serial: int
    when: When
    report: dict[str, Any]
    """The pytest report, as ``pytest_report_to_serializable`` returns it; for a plain pass only outcome and times."""
    at: float = 0.0
    """0 for an additional report."""
    exception: ExceptionSketch | None = None
    collectives: tuple[CollectiveCall, ...] = ()
    plugin_data: bytes = b""
    """The data of `pytest_accel_rank_data`, as `marshal` writes it; empty if there is none."""


class ExpectedEnd(Struct, frozen=True):
    """An end of a rank that would be a failure if the test had not announced it.

    Exactly one of the fields below `rank` is set.
    """

    rank: int | None = None
    """None for `UNEVEN_COLLECTIVES` only."""
    status: int | None = None
    """The process ends with this exit code, or by the signal of this negative number."""
    after: float | None = None
    """The rank hangs: it still runs when all others have finished the call this number of seconds ago."""
    text: str | None = None
    """The call fails on the rank with an error of a device that contains this text."""


UNEVEN_COLLECTIVES = ExpectedEnd()
"""The ranks issue different numbers of collectives."""


class Announced(Struct, frozen=True, tag=True):
    """All announcements of the running call. A rank sends them in the call, each time that something changes."""

    serial: int = 0
    ends: tuple[ExpectedEnd, ...] = ()
    """The ends that the call may have. All ranks send the same."""
    missing_faults: tuple[str, ...] = ()
    """Descriptions of the faults that are planned for this rank and have not come yet."""


class TerminalRequest(Struct, frozen=True, tag=True):
    """A debugger is about to start. The rank waits for the driver's answer, which arrives on a separate connection.

    See `pytest_accel.rank.debugger`.
    """

    method: str | None
    """pytest's name for the way the debugger is started: ``set_trace``, ``runcall``, ``post_mortem``.

    None if the debugger has finished, and the test continues.
    """


class ExitRequest(Struct, frozen=True, tag=True):
    """The test has requested the end of the whole session, by ``pytest.exit`` or with a KeyboardInterrupt."""

    rank: int
    reason: str
    returncode: int | None
    place: str
    """File and line of the request, as pytest shows them."""


class ExceptionSketch(Struct, frozen=True):
    """Type, text and cause of an exception, enough for marks and plugins that examine it in the driver."""

    module: str
    qualname: str
    text: str
    cause: ExceptionSketch | None = None
    of_device: bool = False
    """True for an error of a device."""


class WarningSketch(Struct, frozen=True):
    """A recorded warning."""

    message: str
    category_module: str
    category: str
    filename: str
    lineno: int
    location: tuple[str, int, str] | None


Channel = tuple[bool, int | None, int]
"""Direction (True: the rank receives), the group's rank at the other end, and the tag.

The other end is None for a receive from any rank. The tag is 0 if the backend ignores tags.
"""


class GroupUse(NamedTuple):
    """The operations that one rank has issued in a process group since the group was made."""

    members: tuple[int, ...]
    """The global ranks of the group."""
    collectives: int | None
    """Number of collectives; None if it is unknown: the backend does not count."""
    messages: tuple[tuple[Channel, int], ...] = ()
    """Numbers of messages, by channel."""


class UnawaitedCollective(Struct, frozen=True):
    """A collective that a test has started and not waited for, and that has failed or does not complete."""

    function: str
    """The function of `torch.distributed` that the test has called."""
    path: str
    line: int
    error: str | None
    """First line of the error; None if the collective has not completed."""


class TornDown(Struct, frozen=True, tag=True):
    """The answer to `TEAR_DOWN`."""

    error: ExceptionSketch | None = None
    """The error of the fixtures, or None."""
    text: str = ""
    """The text of the error, with its traceback."""


class LeakKind(Enum):
    """The kinds of things that a test can leave in its rank."""

    SETTING = "setting"
    PROCESS = "process"
    THREAD = "thread"
    GROUP = "process group"
    RPC = "rpc"
    MEMORY = "device memory"
    UNCHECKED = "unchecked"
    """The check for leaks failed."""


class Leak(Struct, frozen=True):
    """One thing that a test has left in its rank."""

    kind: LeakKind
    name: str = ""
    """Name of the setting, command of the process, name of the thread, label of the group, the device, or the error."""
    old: str = ""
    """Value of the setting before the test."""
    new: str = ""
    """Value of the setting after the test."""
    number: int = 0
    """The process id, or the bytes of device memory."""
    lasting: bool = False
    """True if the ranks are replaced because the next test must not find the leak. Other settings are put back."""


class Finished(Struct, frozen=True, tag=True):
    """The last message of a test: its results beyond the reports, and what it has leaked in this rank."""

    serial: int = 0
    uses: Mapping[str, GroupUse] = field(default_factory=dict)
    """The operations of the rank in each of its process groups, by the group's name."""
    warnings: tuple[WarningSketch, ...] = ()
    late_teardown_error: str | None = None
    """Text of an error in the teardown of fixtures that an earlier test had left set up; None if there was none."""
    leaks: tuple[Leak, ...] = ()
    device_error: str = ""
    """The error of work on a device that has made the device unusable for the rank, which must be killed; or empty."""
    groups: int = 0
    """Number of process groups that have been created in the rank, by torch's counter."""
    groups_by_test: int = 0
    """Number of these process groups that the test has created."""
    unawaited: tuple[UnawaitedCollective, ...] = ()
    properties: Mapping[str, Any] = field(default_factory=dict)
    doubt: str = ""
    """Why the ranks do not run another test, although this test did nothing wrong; empty if they may."""


RankMessage = (
    Collected
    | CannotRun
    | ForkReturned
    | PhaseReport
    | Announced
    | TerminalRequest
    | ExitRequest
    | TornDown
    | Finished
    | None
)
"""None: the rank can collect files. If it was started with torch, or as an answer to `PREPARE`: it can run tests."""
RankMessages = tuple[RankMessage, ...]
"""The messages that a rank sends together."""


class ExitCause(Enum):
    """The causes for which the process of a rank ends."""

    EXITED = "exited"
    """The process exited, or a signal killed it; the status says which."""
    OUT_OF_MEMORY = "out of memory"
    """The kernel killed the process, because memory ran out."""
    SERVER_ENDED = "server ended"
    """The fork server of the process ended."""
    MACHINE_LOST = "machine lost"
    """The machine of the process is lost; what happened to the process is unknown."""
    JOB_ENDED = "job ended"
    """The MPI job of the process ended."""


class RankExit(NamedTuple):
    """The end of the process of a rank."""

    cause: ExitCause
    status: int | None = None
    """Exit code, or the negative number of the signal (as in `subprocess`); None if it is unknown."""
    about: str = ""
    """Details on the cause: for a lost machine, its name and why it counts as lost."""

    @property
    def is_crash(self) -> bool:
        """True if the process was killed by a signal for which faulthandler first writes the stacks."""
        return self.cause is ExitCause.EXITED and self.status is not None and is_crash(-self.status)


def exited(status: int) -> RankExit:
    """Return the exit of a process that has ended by itself or by a signal, with `status`."""
    return RankExit(ExitCause.EXITED, status)
