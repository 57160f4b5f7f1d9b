"""The driver's side of a session under a launcher: the other launched processes, and their machines."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from pytest_accel.core import log
from pytest_accel.core.clock import monotonic
from pytest_accel.core.kinds import KINDS
from pytest_accel.core.launcher_env import LauncherEnv, of_a_rank, without_local_rank
from pytest_accel.core.log import step
from pytest_accel.core.stash_keys import MARKED, SESSION
from pytest_accel.core.truncation import ranks_text
from pytest_accel.core.units import count_text
from pytest_accel.features.launchers import rendezvous
from pytest_accel.features.launchers.agent_client import AgentClient
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.machines_starter import Layout, MachinesStarter
from pytest_accel.features.launchers.rendezvous import (
    Address,
    RendezvousError,
    WaitingProcess,
    own_cores,
    use_cores,
    wait_for_end,
)
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.pool.starter import LocalStarter, Starter, StarterReports

_DEVICES = "visible devices"
_LOSS_TIMEOUT = 0.5
"""Seconds to wait, after SIGTERM from the launcher, until the loss of another process is noticed.

The session must end before the launcher sends SIGKILL: Open MPI does so after 1 s (``odls_base_sigkill_timeout``),
torchrun after 30 s.
"""
_LOSS_POLL = 0.01
"""Seconds between two looks for a loss."""


def enter(early_config: pytest.Config, args: list[str], process: LauncherEnv) -> LaunchedSession:
    """Meet the other launched processes; return the session in rank 0, and raise ``SystemExit`` in all others.

    The other processes run as agents until the driver ends. `args` is pytest's own list of the arguments that it has
    not parsed yet. Raise ``pytest.UsageError`` if the processes differ in their arguments, folders or devices.
    """
    log.start(f"process {process.rank} of {process.launcher}")
    step("is one of %d processes, %d of them on this machine", process.size, process.local_size)
    args[:] = without_local_rank(args)
    given = tuple(without_local_rank([str(arg) for arg in early_config.invocation_params.args]))
    masks = sorted(name for kind in KINDS.values() for name in kind.masks if name in os.environ)
    facts = {
        "arguments": " ".join(given) or "none",
        "working directory": str(early_config.invocation_params.dir),
        "root directory": str(early_config.rootpath),
        _DEVICES: " ".join(f"{name}={os.environ[name]}" for name in masks) or "no mask",
    }
    hello = Hello(process.rank, os.getpid(), facts, own_cores(), platform.node())
    try:
        where = rendezvous.find_address(os.environ, process)
        for name in of_a_rank(os.environ):
            del os.environ[name]  # This process is not a rank of a world; each world sets its own values.
        if where is not None:
            session = _enter_several(process, structs.replace(hello, machine=rendezvous.machine_identity()), where)
        elif process.rank != 0:
            raise SystemExit(wait_for_end(rendezvous.join(process, hello)))
        else:
            found = rendezvous.gather(process)
            session = LaunchedSession(process, [hello, *(other for _, other in found.values())])
            for rank, (connection, _) in found.items():
                session.others[rank] = WaitingProcess(connection, session.process_lost)
    except RendezvousError as error:
        step("cannot join: %s", error)
        raise pytest.UsageError(str(error)) from None
    step("all processes are connected")
    difference = find_difference(process.launcher, session.hellos)
    if difference is not None:
        step("ends: %s", difference)
        session.end(int(pytest.ExitCode.USAGE_ERROR))
        raise pytest.UsageError(difference)
    use_cores(session.cores_of(0))
    return session


def _enter_several(process: LauncherEnv, hello: Hello, where: Address) -> LaunchedSession:
    """Do what :func:`enter` does, in a session on several machines."""
    from pytest_accel.features.launchers.agent import Agent  # Imported here, since it needs pyzmq.

    if process.rank != 0:
        raise SystemExit(Agent(rendezvous.join_machines(process, hello, where)).run())
    found, link = rendezvous.gather_machines(process, where)
    session = LaunchedSession(process, [hello, *(other for _, other in found.values())])
    for rank, (agent, other) in found.items():
        machine = session.machine_of(other)
        name, cores = session.machines[machine].name, session.cores_of(machine)
        client = session.others[rank] = AgentClient(link, agent, name, cores=cores)
        if machine:
            session.clients.setdefault(machine, client)
    link.on_lost = session.process_lost
    return session


def find_difference(launcher: str, hellos: Sequence[Hello]) -> str | None:
    """Return a message about the first difference that keeps the processes from forming one session, or None.

    The first of `hellos` is rank 0's. The masks of machines may differ, as their devices do.
    """
    first = hellos[0]
    counts = Counter(hello.machine for hello in hellos)
    if len(set(counts.values())) > 1:
        there = ", ".join(map(str, counts.values()))
        return f"{launcher} has started different numbers of processes on the machines ({there}): start as many on each"
    for other in hellos[1:]:
        for what, own in first.facts.items():
            found = other.facts.get(what)
            if found != own and not (what == _DEVICES and first.machine != other.machine):
                return (
                    f"the processes that {launcher} has started differ in their {what}: rank 0 has {own}, rank "
                    f"{other.rank} has {found}; start all with the same, or use --accel-launcher off, with which each "
                    "has its own session"
                )
    return None


class LaunchedSession(Layout):
    """The launched processes, with the connections to them. Exists in rank 0 only, whose plugin it is."""

    def __init__(self, process: LauncherEnv, hellos: Sequence[Hello]) -> None:
        super().__init__(process, hellos)
        self.others: dict[int, WaitingProcess | AgentClient] = {}
        """The other processes, by rank."""
        self.clients: dict[int, AgentClient] = {}
        """The agents that start ranks, by the number of the machine."""
        self._session: pytest.Session | None = None
        self._strict = False
        self._ran_once: set[str] = set()
        """The node ids of the tests without a mark that this process has run."""

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> Starter[Any]:
        """Return the starter of ranks on several machines; on one machine, `here` starts them."""
        return MachinesStarter(spec, here, self, self.clients, reports) if self.clients else here

    @property
    def loss(self) -> str | None:
        """A message about the processes and machines that were lost; None if there are none."""
        lost: dict[str, None] = {}
        """The lost processes and machines. A machine is lost with all its processes, and named once."""
        for hello in self.hellos[1:]:
            other, machine = self.others.get(hello.rank), self.machine_of(hello)
            if other is None or not other.lost:
                continue
            name = self.machines[machine].name
            if other.machine_loss is not None:
                ranks = ranks_text([one.rank for one in self.groups[machine]])
                lost[f"the machine {name} with {ranks}: {other.machine_loss}"] = None
            else:
                lost[f"rank {hello.rank} (pid {hello.pid}{f' on {name}' if machine else ''})"] = None
        return f"{self.process.launcher} has lost {', '.join(lost)}" if lost else None

    def end(self, status: int) -> None:
        """Have the other processes exit with `status`, after this one."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in self.others.values():
            other.end(status)

    def process_lost(self) -> None:
        """End the session if another process was lost. Called in any thread."""
        if self._session is not None and self.loss is not None:
            self._session.shouldfail = self.loss

    def _on_sigterm(self, number: int, frame: object) -> None:
        """End the session with a message about the cause: if one process has ended, its launcher stops the others."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        deadline = monotonic() + _LOSS_TIMEOUT
        while self.loss is None and monotonic() < deadline:
            time.sleep(_LOSS_POLL)
        pytest.exit(self.loss or f"{self.process.launcher} has sent SIGTERM", returncode=pytest.ExitCode.INTERRUPTED)

    # The plugin

    def configure(self, config: pytest.Config) -> None:
        """Register this plugin; raise ``pytest.UsageError`` if xdist is to distribute the tests."""
        settings = config.stash[SESSION].settings
        self._strict = settings.strict
        for client in self.clients.values():
            client.settings = settings
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
        self.process_lost()

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
