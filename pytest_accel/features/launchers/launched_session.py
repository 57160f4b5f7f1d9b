"""The driver's side of a session under a launcher: the other launched processes, and the clients of their agents."""

from __future__ import annotations

import os
import platform
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from pytest_accel.core import log
from pytest_accel.core.kinds import OWN_KINDS
from pytest_accel.core.launcher_env import LauncherEnv, of_a_rank, without_local_rank
from pytest_accel.core.log import step
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.stash_keys import MARKED, SESSION
from pytest_accel.core.units import count_text
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import Resources
from pytest_accel.features.launchers import agent, rendezvous
from pytest_accel.features.launchers.agent_client import AgentClient, EnvironmentChanges
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.machines_starter import MachinesStarter
from pytest_accel.features.launchers.missing_places import missing_place
from pytest_accel.features.launchers.placement import Layout, RankMachine
from pytest_accel.features.launchers.rendezvous import RendezvousError
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.starter import StarterReports

if TYPE_CHECKING:
    from pytest_accel.features.launchers.machine_link import DriverLink

_LOSS_TIMEOUT = 0.5
"""Seconds to wait, after SIGTERM from the launcher, until the loss of another process is noticed.

The session must end before the launcher sends SIGKILL: Open MPI does so after 1 s (``odls_base_sigkill_timeout``),
torchrun after 30 s.
"""


def enter(early_config: pytest.Config, args: list[str], process: LauncherEnv) -> LaunchedSession:
    """Meet the other launched processes; return the session in rank 0, and raise ``SystemExit`` in all others.

    The other processes run as agents until the driver ends. `args` is pytest's own list of the arguments that it has
    not parsed yet. Raise ``pytest.UsageError`` if the processes differ in their arguments, folders or devices.
    """
    log.start(f"process {process.rank} of {process.launcher}")
    step("is one of %d processes, %d of them on this machine", process.size, process.local_size)
    args[:] = without_local_rank(args)
    given = tuple(without_local_rank([str(arg) for arg in early_config.invocation_params.args]))
    root = str(early_config.rootpath)
    hello = Hello(
        process.rank, os.getpid(), given, str(early_config.invocation_params.dir), root, _masks(), platform.node()
    )
    try:
        where = rendezvous.find_address(os.environ, process)
        if where is not None:
            hello = structs.replace(hello, machine=rendezvous.machine_identity())
        for name in of_a_rank(os.environ):
            del os.environ[name]  # This process is not a rank of a world; each world sets its own values.
        if process.rank != 0:
            driver = rendezvous.join(process, hello, where)
            if not isinstance(driver, Connection):
                at, there = driver.own_address, driver.driver_address
                hello = structs.replace(hello, address=at, driver_address=there, link=driver.name)
            raise SystemExit(agent.serve_driver(driver, hello))
        session = LaunchedSession(process, hello, *rendezvous.gather(process, hello, where))
    except RendezvousError as error:
        step("cannot join: %s", error)
        raise pytest.UsageError(str(error)) from None
    step("all processes are connected")
    difference = find_difference(process.launcher, [hello, *session.hellos.values()])
    if difference is not None:
        step("ends: %s", difference)
        session.end(int(pytest.ExitCode.USAGE_ERROR))
        raise pytest.UsageError(difference)
    return session


def _masks() -> dict[str, str]:
    """Return the mask variables of all kinds that are set in this process."""
    names = {name for kind in OWN_KINDS for name in make_vendor(kind).mask((), os.environ)}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def find_difference(launcher: str, hellos: Sequence[Hello]) -> str | None:
    """Return a message about the first difference that keeps the processes from forming one session, or None.

    The first of `hellos` is rank 0's.
    """
    first = hellos[0]
    for other in hellos[1:]:
        for what, show in _COMPARED.items():
            remote = other.machine != first.machine
            if _compared(first, show, remote=remote) != _compared(other, show, remote=remote):
                return (
                    f"the processes that {launcher} has started differ in their {what}: rank 0 has {show(first)}, rank "
                    f"{other.rank} has {show(other)}; start all with the same, or use --accel-launcher off, with which "
                    "each has its own session"
                )
    return None


def _masked(hello: Hello) -> str:
    return " ".join(f"{name}={value}" for name, value in hello.masks.items()) or "no mask"


_COMPARED: Mapping[str, Callable[[Hello], str]] = {
    "arguments": lambda hello: " ".join(hello.args) or "none",
    "working directory": lambda hello: hello.directory,
    "root directory": lambda hello: hello.rootdir,
    "visible devices": _masked,
}
"""The facts that must be equal, by name, each with a function that returns its text."""


def _compared(hello: Hello, show: Callable[[Hello], str], *, remote: bool) -> object:
    """Return the value that must be equal: for masks on another machine only their lengths, since devices differ."""
    if remote and show is _masked:
        return {name: len(value.split(",")) for name, value in hello.masks.items()}
    return show(hello)


def layout_of(hellos: Sequence[Hello]) -> Layout:
    """Return the machines of the session: rank 0's first, then in the order of their lowest ranks."""
    groups: dict[str, list[Hello]] = {}
    for hello in hellos:
        groups.setdefault(hello.machine, []).append(hello)
    hosts = [group[0].host for group in groups.values()]
    own_address = next((hello.driver_address for hello in hellos if hello.driver_address), "")
    machines = []
    for first, *others in groups.values():
        name = first.host if not first.address or hosts.count(first.host) == 1 else f"{first.host} ({first.address})"
        servers = tuple(hello.rank for hello in (first, *others))
        machines.append(RankMachine(name, first.address or own_address, servers))
    return Layout(tuple(machines))


class LaunchedSession:
    """The other launched processes, as rank 0 sees them, with a client for the agent of each, by its rank.

    Exists in rank 0 only, which is the driver, and is a plugin of its session.
    """

    def __init__(
        self, process: LauncherEnv, own: Hello, joined: Mapping[int, tuple[Hello, Connection]], link: DriverLink | None
    ) -> None:
        """`own` is the greeting of this process, and `link` this end of the connections to other machines."""
        self.process = process
        self.hellos = {rank: hello for rank, (hello, _) in joined.items()}
        self.layout = layout_of([own, *self.hellos.values()])
        self._session: pytest.Session | None = None
        self._strict = False
        self._ran_once: set[str] = set()
        """The node ids of the tests without a mark that this process has run."""
        self._ended = False
        self._loss = threading.Event()
        """Set once the loss of another process has been noticed."""
        changes = EnvironmentChanges()
        self.clients = {
            hello.rank: AgentClient(
                connection,
                self._name(hello.rank),
                self._agent_lost,
                changes,
                (link, hello.link) if link is not None and hello.link else None,
            )
            for hello, connection in joined.values()
        }

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> MachinesStarter:
        """Return the starter of ranks in the launched processes."""
        return MachinesStarter(spec, here, self, reports)

    @property
    def capacity(self) -> int:
        """The maximum number of ranks of a world."""
        return self.layout.capacity

    def missing(self, key: WorldKey, resources: Resources) -> str | None:
        """Return why the launched processes can never run the group of ranks of `key`, or None if they can."""

        def remote(machine: int) -> Inventory | str:
            client = self.clients[self.layout.machines[machine].servers[0]]
            client.settings = resources.settings
            return client.inventory(key.kind)

        return missing_place(key, self.layout, self.process.launcher, resources, remote)

    @property
    def loss(self) -> str | None:
        """A message about the processes and machines that were lost; None if there are none."""
        gone = {rank: client.machine_loss for rank, client in self.clients.items() if client.lost}
        lost_machines = {self.hellos[rank].machine: why for rank, why in gone.items() if why is not None}
        named = [
            f"rank {rank} (pid {self.hellos[rank].pid}{self._on_machine(rank)})"
            for rank in gone
            if self.hellos[rank].machine not in lost_machines
        ]
        for machine, why in lost_machines.items():
            ranks = [rank for rank, hello in self.hellos.items() if hello.machine == machine]
            named.append(f"the machine {self._name(ranks[0])} with {ranks_text(ranks)}: {why}")
        return f"{self.process.launcher} has lost {', '.join(named)}" if named else None

    @property
    def about(self) -> str:
        """A short description of the launched processes."""
        machines = self.layout.machines
        where = ", ".join(f"{machine.name} ({ranks_text(machine.servers)})" for machine in machines)
        return (
            self.process.about if len(machines) == 1 else f"{self.process.about} on {len(machines)} machines: {where}"
        )

    def _name(self, rank: int) -> str:
        return next(machine.name for machine in self.layout.machines if rank in machine.servers)

    def _on_machine(self, rank: int) -> str:
        return "" if rank in self.layout.machines[0].servers else f" on {self._name(rank)}"

    def end(self, status: int) -> None:
        """Have the other processes exit with `status`, after this one."""
        self._ended = True
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for client in self.clients.values():
            client.end(status)

    def _agent_lost(self) -> None:
        self._loss.set()
        if not self._ended and self._session is not None and self.loss is not None:
            self._session.shouldfail = self.loss

    def _on_sigterm(self, number: int, frame: object) -> None:
        """End the session with a message about the cause: if one process has ended, its launcher stops the others."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._loss.wait(_LOSS_TIMEOUT)
        pytest.exit(self.loss or f"{self.process.launcher} has sent SIGTERM", returncode=pytest.ExitCode.INTERRUPTED)

    # The plugin

    def configure(self, config: pytest.Config) -> None:
        """Register this plugin; raise ``pytest.UsageError`` if xdist is to distribute the tests."""
        self._strict = config.stash[SESSION].settings.strict
        count = getattr(config.option, "numprocesses", None)
        if count or getattr(config.option, "tx", None):
            launcher = self.process.launcher
            self.end(int(pytest.ExitCode.USAGE_ERROR))
            raise pytest.UsageError(
                f"-n {count or '(xdist)'} under {launcher}: use only one of the two. {launcher} without -n runs each "
                f"test in the ranks that it has started; pytest -n {count or 'N'} without {launcher} distributes the "
                "tests over workers, whose ranks the plugin starts by itself"
            )
        config.pluginmanager.register(self, "accel-launcher")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._loss.is_set():
            self._agent_lost()

    @pytest.hookimpl
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fail a test without a mark under ``--accel-strict``, unless a mark skips it: pytest's own hook runs first."""
        if self._strict and MARKED not in item.stash:
            process = self.process
            pytest.fail(
                f"the test has no mark, so it would run once, not in the {process.size} processes that "
                f"{process.launcher} has started (--accel-strict): add @pytest.mark.distributed({process.size}), or "
                "@pytest.mark.distributed(1) if one process is enough",
                pytrace=False,
            )

    @pytest.hookimpl
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        if MARKED not in item.stash:
            self._ran_once.add(item.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._ran_once:
            count, process = count_text(len(self._ran_once), "test"), self.process
            terminalreporter.section(f"accel: tests under {process.launcher}", sep="-")
            terminalreporter.write_line(f"{count} without a mark ran once, not in {process.size} processes")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self.end(int(self._session.exitstatus) if self._session is not None else 0)
