"""The machines of a session: where ranks are placed on them, and the starter of these ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.core.truncation import ranks_text
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import Resources, missing_devices
from pytest_accel.features.launchers.agent_client import AgentClient, RemoteLease
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.server_group import ServerGroup
from pytest_accel.hardware.matching import in_words
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.leases import HeldLease
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.starter import LocalStarter, StarterReports


@dataclass(frozen=True, slots=True)
class RankMachine:
    """One machine of a session."""

    name: str
    """The name for messages to the user."""
    address: str
    """The address at which other machines reach it."""


class Layout:
    """The processes that a launcher has started, and their machines."""

    def __init__(self, process: LauncherEnv, hellos: Sequence[Hello]) -> None:
        """`process` is rank 0; `hellos` has the greetings of all processes, rank 0's first."""
        self.process = process
        self.hellos = hellos
        self.capacity = process.size
        """The maximum number of ranks of a world."""
        groups: dict[str, list[Hello]] = {}
        for hello in hellos:
            groups.setdefault(hello.machine, []).append(hello)
        self.groups = tuple(groups.values())
        """The processes of each machine: rank 0's first, then in the order of their lowest ranks."""
        hosts = [group[0].host for group in self.groups]
        addresses = [group[0].address or self.groups[-1][0].driver_address for group in self.groups]
        self.machines = tuple(
            RankMachine(host if hosts.count(host) == 1 else f"{host} ({address})", address)
            for host, address in zip(hosts, addresses, strict=True)
        )

    @property
    def about(self) -> str:
        """A short description of the launched processes."""
        if len(self.machines) == 1:
            return self.process.about
        where = ", ".join(
            f"{machine.name} ({ranks_text([hello.rank for hello in group])})"
            for machine, group in zip(self.machines, self.groups, strict=True)
        )
        return f"{self.process.about} on {len(self.machines)} machines: {where}"

    def machine_of(self, hello: Hello) -> int:
        """Return the number of the machine of a process."""
        return next(number for number, group in enumerate(self.groups) if hello in group)

    def cores_of(self, machine: int) -> tuple[int, ...]:
        """Return the CPU cores that the processes of a machine may use together."""
        return tuple(sorted({core for hello in self.groups[machine] for core in hello.cores}))

    def machines_of(self, ranks: int, machines: int) -> list[int]:
        """Return the machine of each rank of a world for which there are enough machines (:meth:`missing`).

        The world is on as few machines as possible, but at least `machines`, beginning with the driver's. Ranks are
        distributed evenly over the machines, and the ranks of one machine have consecutive numbers.
        """
        count = max(machines, -(-ranks // len(self.groups[0])))
        each, rest = divmod(ranks, count)
        return [machine for machine in range(count) for _ in range(each + (machine < rest))]

    def missing(self, key: WorldKey, resources: Resources) -> str | None:
        """Return why the launched processes can never run the group of ranks of `key`, or None if they can."""
        launcher = self.process.launcher
        if key.ranks > self.capacity:
            return f"needs {key.ranks} ranks; {launcher} has started {self.capacity}"
        if key.machines > len(self.machines):
            return f"needs {key.machines} machines; {launcher} has started ranks on {len(self.machines)}"
        if key.launcher is not None:
            return f"its ranks are started by {key.launcher}, which a session under {launcher} does not do"
        machines = self.machines_of(key.ranks, key.machines)
        if key.need is None or not any(machines):
            return missing_devices(key, resources)
        # All machines count as equal to this one, which has the most ranks. The agent of a machine with fewer devices
        # refuses their lease.
        missing = missing_devices(replace(key, need=key.needs(machines)[0]), resources)
        return None if missing is None else f"{missing} (on {self.machines[0].name})"


@dataclass(eq=False)
class MachinesTaken:
    """The leases of a world on the devices of each machine."""

    demand: WorldDemand
    here: HeldLease | None = None
    """The lease on devices or CPU slots of this machine."""
    remote: dict[int, RemoteLease] = field(default_factory=dict)
    """The leases on devices of other machines, by machine."""
    machines: tuple[int, ...] = ()
    """The machine of each rank, once the world has its place; empty if all are on this machine."""
    wanted_elsewhere: bool = False
    """True if another request waits for devices of other machines."""

    @property
    def wanted(self) -> bool:
        """True if another request waits for these devices."""
        return self.wanted_elsewhere or (self.here is not None and self.here.wanted)


Own = TypeVar("Own", bound=MachinesTaken)


class StarterOnMachines(ServerGroup, ABC, Generic[Own]):
    """The base of starters whose ranks are on several machines."""

    def __init__(
        self,
        spec: SessionSpec,
        here: LocalStarter,
        machines: Sequence[RankMachine],
        clients: Mapping[int, AgentClient],
        reports: StarterReports,
    ) -> None:
        """`here` has the leases of this machine, the first of `machines`.

        `clients` has those of the agents that start ranks, by the number of the machine.
        """
        super().__init__(spec, reports.report, self._server_ended)
        self._reports = reports
        self._here = here
        self._machines = list(machines)
        self._clients = dict(clients)
        self._taken: list[Own] = []
        self._leasing: dict[int, str] = {}
        """The devices, in words, for which each demand waits on another machine; by the demand's `id`."""

    @property
    def leases(self) -> StarterOnMachines[Own]:
        return self

    @property
    def machines(self) -> tuple[str, ...]:
        return tuple(machine.name for machine in self._machines)

    def serves(self, key: WorldKey) -> bool:
        return True

    def warm(self) -> None:
        self._run_servers(range(len(self._machines)))

    def _order(self, machine: int) -> tuple[str, str]:
        """Return a key that sorts machines in the same way in all sessions, whichever machine has the driver."""
        return self._machines[machine].name, self._machines[machine].address

    # Taking and returning

    async def _lease(self, taken: Own, needs: Mapping[int, DeviceNeed | None], masks: Mapping[int, str]) -> Own:
        """Lease the devices of each machine, or CPU slots of this machine if its need is None."""
        demand = taken.demand
        try:
            # Ask one machine after the other, in an order that all sessions have. This prevents deadlocks: of two
            # sessions that need the same machines, the session that gets the first also gets the others.
            for machine in sorted(needs, key=self._order):
                need = needs[machine]
                if machine and need is not None:
                    what = f"{in_words(need, demand.key.kind)} of the machine {self.machines[machine]}"
                    self._leasing[id(demand)] = what
                    taken.remote[machine] = await self._clients[machine].lease(demand, need, masks.get(machine))
                    del self._leasing[id(demand)]
                else:
                    taken.here = await self._here.leases.take(demand, need=need)
        except BaseException:
            self._return(taken, killed=False)
            raise
        finally:
            self._leasing.pop(id(demand), None)
        self._taken.append(taken)
        return taken

    def waiting(self, demand: WorldDemand) -> tuple[str, list[str]] | None:
        what = self._leasing.get(id(demand))
        return self._here.leases.waiting(demand) if what is None else (what, [])

    def hand_on(self, taken: Own) -> WorldDemand | None:
        return None if taken.remote or taken.here is None else self._here.leases.hand_on(taken.here)

    def describe(self, taken: Own, test: str, pids: Sequence[int]) -> None:
        if taken.here is not None:
            own = pids[: taken.machines.count(0)] if taken.machines else pids  # Ranks of this machine come first.
            self._here.leases.describe(taken.here, test, own)

    def give_back(self, taken: Own, *, killed: bool) -> None:
        self._taken.remove(taken)
        self._return(taken, killed=killed)

    def _return(self, taken: Own, *, killed: bool) -> None:
        if taken.here is not None:
            self._here.leases.give_back(taken.here, killed=killed)
        for lease in taken.remote.values():
            lease.close()

    # Starting and ending

    def _run_servers(self, machines: Collection[int]) -> None:
        """Start the fork servers of these machines that do not run. Raise OSError if that is not possible."""
        self.run({one: self._clients[one].spawn if one else self._here.spawn for one in machines})

    def _on_machines(self, spec: WorldSpec, taken: Own, machines: Sequence[int]) -> WorldSpec:
        """Return `spec` with its ranks on `machines`."""
        key = spec.key
        left = {machine: iter(lease.devices) for machine, lease in taken.remote.items()}
        if taken.here is not None:
            left[0] = iter(taken.here.devices)
        taken.machines = tuple(machines)
        is_spread = len(set(machines)) > 1
        return replace(
            spec,
            servers=taken.machines,
            machines=taken.machines,
            addresses=tuple(self._machines[machine].address for machine in machines) if is_spread else (),
            devices=tuple(
                next(left[machine]) for machine in taken.machines for _ in range(key.devices_per_rank if left else 0)
            ),
        )

    def start(self, spec: WorldSpec, taken: Own) -> None:
        self._run_servers(set(spec.servers))
        self.start_ranks(spec, lambda: taken.here.descriptors if taken.here is not None else ())

    def keeps(self, key: WorldKey) -> bool:
        return key.need is not None

    @abstractmethod
    async def take(self, demand: WorldDemand) -> Own:
        """See :meth:`Starter.take`."""

    @abstractmethod
    def place(self, spec: WorldSpec, taken: Own) -> WorldSpec:
        """See :meth:`Starter.place`."""

    def _server_ended(self, server: int, loss: str | None) -> None:
        self._reports.lost_ranks(self, server, loss)


class MachinesStarter(StarterOnMachines[MachinesTaken]):
    """The starter of ranks on the machines of a launcher's processes."""

    def __init__(
        self,
        spec: SessionSpec,
        here: LocalStarter,
        layout: Layout,
        clients: Mapping[int, AgentClient],
        reports: StarterReports,
    ) -> None:
        super().__init__(spec, here, layout.machines, clients, reports)
        self._layout = layout

    async def take(self, demand: WorldDemand) -> MachinesTaken:
        key = demand.key
        needs: Mapping[int, DeviceNeed | None] = {0: key.need}
        if key.need is not None and key.ranks:
            needs = key.needs(self._layout.machines_of(key.ranks, key.machines))
        for other in self._taken:
            # One test runs at a time, so the other world is idle, and is retired: even if there are devices for both,
            # which only the agents know.
            other.wanted_elsewhere |= not other.remote.keys().isdisjoint(needs)
        self._reports.give_up_wanted()
        return await self._lease(MachinesTaken(demand), needs, {})

    def place(self, spec: WorldSpec, taken: MachinesTaken) -> WorldSpec:
        if spec.key.grouped:
            return self._on_machines(spec, taken, self._layout.machines_of(spec.ranks, spec.key.machines))
        return replace(spec, devices=() if taken.here is None else taken.here.devices)
