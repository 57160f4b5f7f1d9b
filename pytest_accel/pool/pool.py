"""The pool: the only owner of a session's leases and worlds. It lives in the controller."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.rank_exit import RankExit
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.world_key import WorldKey
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.diagnostics.diagnosis import Interrupted
from pytest_accel.forkserver.server_client import Spawn, spawn_here
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import in_words
from pytest_accel.leases.allocator import Allocator
from pytest_accel.leases.broker import BrokerError
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lease_table import Lease
from pytest_accel.leases.lock_dir import LockFolderError
from pytest_accel.nodes.placement import HERE, Layout
from pytest_accel.nodes.remote_leases import FarSupplyError, RemoteLease, RemoteLeases
from pytest_accel.pool.multinode_lease import DeviceSource, LocalSource, MultiNodeRequest, NodeNeed
from pytest_accel.pool.records import Grant, PooledWorld, PoolError, Ticket, surplus
from pytest_accel.pool.world_manager import WorldManager

LINGER = 30.0
"""Seconds after which an idle world is retired, so that other sessions can use its devices."""
_IDLE_RANKS = 16
"""Number of idle ranks to keep warm; twice the number of CPU slots if that is more."""


class Pool:
    """The leases and worlds of one session.

    Thread-safe. Requests never block: callbacks deliver the answers. Only :meth:`close` waits.
    """

    def __init__(
        self,
        machine: Machine,
        spec: SessionSpec,
        slots: int,
        on_wanted: Callable[[object, int], None],
        *,
        waits_for_busy: bool = False,
        servers: Sequence[Spawn] = (spawn_here,),
        layout: Layout = HERE,
        far: Mapping[int, RemoteLeases] = MappingProxyType({}),
    ) -> None:
        """`slots` is the maximum number of ranks that run on the CPU at once; a larger world runs alone.

        ``on_wanted(driver, world)`` is called when a request waits for the devices or slots of a world that runs a
        test. `waits_for_busy` is True for ``--accel-busy wait``. `servers` start the fork servers from which ranks are
        forked, and `layout` says on which nodes these are. `far` has the devices of all nodes but this one, by node
        number.
        """
        self._machine = machine
        self._slots = slots
        self._measured = spec.coverage is not None
        self._on_wanted = on_wanted
        self._lock = threading.RLock()
        self._supply = Allocator(machine, slots, self._lease_wanted, self._lease_lost, waits_for_busy=waits_for_busy)
        self._manager = WorldManager(spec, self._lock, self, servers)
        self._layout = layout
        self._far = far
        for node, source in far.items():
            source.on_wanted = partial(self._far_lease_wanted, node)
            source.on_lost = partial(self._far_lease_lost, node)
            source.on_failure = self._manager.fail
        self._tickets: dict[int, Ticket] = {}
        self._wanted_leases: set[tuple[str | None, int]] = set()
        self._lost_leases: dict[tuple[str | int | None, int], str] = {}
        """Leases whose lock was lost before they had a world, with the reason; the key is kind or node, and number."""
        self._last_number = 0

    # Called by drivers

    def warm(self) -> None:
        """Start the fork server, so that it preloads modules while tests are collected."""
        with self._lock, contextlib.suppress(OSError):  # The first test that needs the server reports the error.
            self._manager.warm()

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have the fork server import `modules`, unless it has forked ranks or an import would make forking unsafe."""
        with self._lock:
            self._manager.preload(modules)

    def import_nothing_ahead(self, why: str) -> None:
        """Have ranks forked from a server that has imported only torch and pytest; ``-v`` shows `why`."""
        with self._lock:
            self._manager.import_nothing_ahead(why)

    def keep_out(self, modules: tuple[str, ...]) -> None:
        """Have ranks forked from a server that has not preloaded any of `modules`."""
        with self._lock:
            self._manager.keep_out(modules)

    def acquire(
        self, key: WorldKey, holder: Holder, driver: object, answer: Callable[[Grant | PoolError], None]
    ) -> int:
        """Request a world of `key`; return the id of the ticket. `answer` may be called before this returns."""
        with self._lock:
            self._last_number += 1
            ticket = Ticket(self._last_number, key, holder, answer, driver)
            if self._manager.broken is not None:
                self._answer(ticket, PoolError(self._manager.broken))
                return ticket.id
            try:
                self._request(ticket)
            except Exception as error:
                ticket.cancelled = True
                self._fail(ticket, error)
            return ticket.id

    def cancel(self, ticket_id: int) -> None:
        """Withdraw the request of a ticket, without an answer."""
        with self._lock:
            ticket = self._tickets.pop(ticket_id, None)
            if ticket is None:
                return
            ticket.cancelled = True
            if ticket.multinode is not None:
                ticket.multinode.cancel()
            if ticket.request is not None:
                self._supply.broker(ticket.broker).cancel(ticket.request)

    def withdraw(self, ticket_id: int, why: str) -> None:
        """Answer with an error if the ticket still waits for devices; a ticket that has them still gets its world."""
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            if ticket is not None and ticket.multinode is not None:
                self.cancel(ticket.id)
                self._answer(ticket, PoolError(why))
            if ticket is None or ticket.request is None:
                return
            obstacles = self._supply.obstacles(ticket.broker, ticket.request) or []
            if not self._supply.broker(ticket.broker).cancel(ticket.request):
                return
            ticket.cancelled = True
            self._answer(ticket, PoolError("\n".join([why, *obstacles])))

    def waiting(self, ticket_id: int) -> str | None:
        """Return a line with the test, what it waits for and who holds that; None if the ticket waits for no lease."""
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            if ticket is None:
                return None
            need, node = ticket.key.need, 0
            if ticket.multinode is not None:
                node, need, request = ticket.multinode.waiting
            else:
                request = ticket.request
            if request is None:
                return None
            if need is None:
                count = min(ticket.key.ranks, self._slots)
                what = f"{count} CPU slot{'' if count == 1 else 's'}"
            else:
                what = in_words(need, ticket.key.kind)
            waits = f"{ticket.holder.test} waits for {what}"
            if node:
                return f"{waits} of the node {self._layout.nodes[node].name}"
            obstacles = self._supply.obstacles(ticket.broker, request)
            return None if obstacles is None else ": ".join(filter(None, (waits, "; ".join(obstacles))))

    def withdraw_waiting(self) -> list[str]:
        """Cancel all tickets that wait for a lease; return the line of :meth:`waiting` for each."""
        with self._lock:
            lines = []
            for number in list(self._tickets):
                if (line := self.waiting(number)) is not None:
                    lines.append(line)
                    self.cancel(number)
            return lines

    def fail(self, why: str) -> None:
        """Terminate all worlds, and answer all waiting and later requests with an error.

        Called when a thread of the session has ended; `why` has its traceback.
        """
        self._manager.fail(why)

    def release(self, number: int, harm: str | None, noticed: frozenset[int], worn: bool = False) -> None:
        """Return a world that a driver has used.

        `harm` says why the world must be killed. `worn` retires the world: it must not run another test, but its
        session fixtures can be torn down. With both, the world is killed unless ranks measure coverage: then it is
        retired, since a killed rank loses its data.

        `noticed` are the ranks whose death the driver has reported in a test. Any other dead rank is reported as a
        complaint: a test killed it and passed.
        """
        with self._lock:
            world = self._manager.worlds.get(number)
            if world is None or world.state != "leased":
                return
            for rank, end in world.exits.items():
                if rank not in noticed:
                    self._manager.complain(world, rank, end, "died after its last test had passed")
            world.ticket = None
            if world.exits or (harm is not None and not (worn and self._measured)):
                self._manager.kill(world)
            elif world.spec.key.fresh or worn or self._manager.closing:
                self._manager.retire(world)
                if harm is not None:
                    world.state = "killed"  # Errors while its sessions end are not complaints.
            else:
                world.state, world.idle_since = "idle", monotonic()
            # Only after the world is idle: releasing slots may grant waiting requests synchronously.
            self._release_slots(world)
            if world.state == "idle":
                if world.lease is None:
                    world.wanted = False
                elif world.wanted and not self._pass_on(world):
                    self._manager.retire(world)
                self._retire_surplus()

    def look_at_interrupted(self, number: int | None = None, test: str = "") -> None:
        """Record where the ranks of world `number`, which runs `test`, are; of all worlds that run a test if None."""
        with self._lock:
            for world in list(self._manager.worlds.values()):
                if world.state == "leased" and number in (None, world.spec.world):
                    self._manager.look_at_interrupted(world, test)

    def watch_exit(self, number: int, rank: int, on_exit: Callable[[RankExit | None], None]) -> None:
        """Call `on_exit` with the rank's exit status once it has ended; with None if the status is unknown."""
        with self._lock:
            self._manager.watch_exit(number, rank, on_exit)

    def driver_lost(self, driver: object) -> None:
        """Cancel the requests of a driver whose process has ended, and terminate its worlds."""
        with self._lock:
            for ticket in [ticket for ticket in self._tickets.values() if ticket.driver == driver]:
                self.cancel(ticket.id)
            for world in list(self._manager.worlds.values()):
                if world.ticket is not None and world.ticket.driver == driver:
                    world.ticket.cancelled = True
                    if world.state == "leased":
                        self.release(world.spec.world, "its driver ended", frozenset(world.exits))

    def close(self, *, politely: bool) -> None:
        """Terminate all worlds and the fork server, and wait until every process has ended.

        With `politely`, session fixtures are torn down first; their errors become complaints.
        """
        with self._lock:
            for ticket in list(self._tickets.values()):
                self.cancel(ticket.id)
            self._manager.end_worlds(politely=politely)
        self._manager.stop_server()
        with self._lock:
            self._supply.close()

    @property
    def complaints(self) -> list[str]:
        """Errors that belong to no test, such as one in the teardown of a session fixture."""
        return self._manager.complaints

    @property
    def interrupted(self) -> list[Interrupted]:
        """The tests that ran when the session was interrupted."""
        return self._manager.interrupted

    @property
    def notes(self) -> list[str]:
        """Lines to show with ``-v``."""
        return self._manager.notes

    # Leases

    def _lease_wanted(self, kind: str | None, lease: int) -> None:
        """Retire the idle world that holds `lease`, or tell the driver that uses it; `kind` is None for CPU slots."""
        with self._lock:
            self._wanted_leases.add((kind, lease))  # The world of this lease may not exist yet.
            for world in list(self._manager.worlds.values()):
                held = world.slots if kind is None else world.lease if world.spec.key.kind == kind else None
                if held is None or held.id != lease:
                    continue
                world.wanted = True
                if world.state == "idle":
                    self._manager.retire(world)
                elif world.state == "leased" and world.ticket is not None:
                    self._on_wanted(world.ticket.driver, world.spec.world)

    def _lease_lost(self, kind: str | None, lease: int, why: str) -> None:
        with self._lock:
            for world in list(self._manager.worlds.values()):
                if world.spec.key.kind == kind and world.lease is not None and world.lease.id == lease:
                    self._manager.revoke(world, why)
                    return
            self._lost_leases[kind, lease] = why

    def _far_lease_lost(self, node: int, number: int, why: str) -> None:
        with self._lock:
            for world in list(self._manager.worlds.values()):
                if node in world.remote_leases and world.remote_leases[node].number == number:
                    self._manager.revoke(world, why)
                    return
            self._lost_leases[node, number] = why

    def _far_lease_wanted(self, node: int, number: int) -> None:
        with self._lock:
            for world in list(self._manager.worlds.values()):
                remote = world.remote_leases.get(node)
                if remote is not None and remote.number == number and world.lease is not None:
                    self._lease_wanted(world.spec.key.kind, world.lease.id)

    def _request(self, ticket: Ticket) -> None:
        """Answer `ticket` with a warm world, or queue a request for the lease that a new world needs."""
        key, holder = ticket.key, ticket.holder
        self._tickets[ticket.id] = ticket
        granted = partial(self._granted, ticket)
        if key.need is None:
            slots = min(key.ranks, self._slots)
            ticket.request = self._supply.broker(None).submit((), 0, holder, granted, slots=slots)
            return
        broker = self._supply.broker(key.kind)
        world = self._manager.idle(key)
        if world is not None and world.lease is not None:
            broker.describe(world.lease.id, test=holder.test)
            self._hand_over(world, ticket)
            return
        needs = key.needs([seat.node for seat in self._layout.seats(key.ranks, key.nodes)] if self._far else [0])
        if len(needs) > 1:
            self._request_multinode(ticket, needs)
            return
        unavailable = self._supply.lost(key.kind, key.need)
        if unavailable is not None:
            self._answer(ticket, PoolError(unavailable))
            return
        ticket.request = self._supply.submit(key.kind, key.need, holder, granted, partial(self._fail, ticket))

    def _request_multinode(self, ticket: Ticket, needs: Mapping[int, DeviceNeed]) -> None:
        sources: dict[int, DeviceSource] = {0: LocalSource(self._supply), **self._far}
        node_needs = [NodeNeed(node, sources[node], needs[node]) for node in self._layout.order(needs)]
        granted, failed = partial(self._granted_multinode, ticket), partial(self._fail, ticket)
        ticket.multinode = MultiNodeRequest(self._lock, ticket.key.kind, node_needs, ticket.holder, granted, failed)
        ticket.multinode.submit()

    def _granted_multinode(self, ticket: Ticket, leases: dict[int, Any]) -> None:
        ticket.multinode = None
        local = leases.pop(0)
        try:
            self._start(ticket, local, None, leases)
        except Exception as error:
            self._fail(ticket, error)
            self._supply.give_back(ticket.key.kind, local, killed=False)
            for node, lease in leases.items():
                self._far[node].give_back(ticket.key.kind, lease, killed=False)

    def _granted(self, ticket: Ticket, lease: Lease) -> None:
        with self._lock:
            if ticket.cancelled or self._manager.closing:
                self._supply.broker(ticket.broker).release(lease.id)
                return
            try:
                self._use(ticket, lease)
            except Exception as error:  # This may be the broker's thread: nobody would answer the driver.
                self._fail(ticket, error)  # Before the release, which may raise as well.
                self._supply.broker(ticket.broker).release(lease.id)

    def _use(self, ticket: Ticket, lease: Lease) -> None:
        if ticket.key.need is not None:
            self._start(ticket, lease, None)
            return
        world = self._manager.idle(ticket.key)
        if world is None:
            self._start(ticket, None, lease)
        else:
            world.slots = lease
            self._hand_over(world, ticket)

    # Worlds

    def _hand_over(self, world: PooledWorld, ticket: Ticket) -> None:
        warm = world.state != "starting"
        world.state, world.ticket = "leased", ticket
        self._answer(ticket, Grant(world.spec, world.pids, self._manager.directory, warm))
        if world.wanted:  # The broker said so, only once, while the world was being started.
            self._on_wanted(ticket.driver, world.spec.world)

    def _pass_on(self, world: PooledWorld) -> bool:
        """Hand a wanted world to the next ticket in the queue if that asks for the same key; return True if done."""
        assert world.lease is not None
        # Not idle: the broker may report the lease as wanted meanwhile, which would retire an idle world.
        world.state, world.wanted = "leased", False
        for ticket in self._tickets.values():
            if ticket.key == world.spec.key and ticket.request is not None:
                if self._supply.broker(world.spec.key.kind).pass_on(world.lease.id, ticket.request):
                    self._hand_over(world, ticket)
                    return True
                return False
        return False

    def _answer(self, ticket: Ticket, answer: Grant | PoolError) -> None:
        self._tickets.pop(ticket.id, None)
        ticket.answer(answer)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        expected = isinstance(error, (LockFolderError, BrokerError, FarSupplyError))
        self._answer(ticket, PoolError(str(error) if expected else "".join(traceback.format_exception(error))))

    def _start(
        self,
        ticket: Ticket,
        lease: Lease | None,
        slots: Lease | None,
        far: Mapping[int, RemoteLease] = MappingProxyType({}),
    ) -> None:
        key = ticket.key
        leases: list[tuple[str | int | None, int]] = [(node, remote.number) for node, remote in far.items()]
        leases += [(key.kind, lease.id)] if lease is not None else []
        for one in leases:
            if one in self._lost_leases:
                raise LockFolderError(self._lost_leases[one])
        ids = lease.devices if lease else ()
        by_id = {device.id: device for device in self._machine.of(key.kind).devices} if ids else {}
        self._last_number += 1
        argument = self._machine.argument(key.kind)
        devices = [by_id[name] for name in ids]
        devices += [device for node in sorted(far) for device in far[node].devices]
        spec = self._placed(WorldSpec(self._last_number, key, argument, tuple(devices)))
        world = PooledWorld(spec, "starting", ticket, lease, dict(far), slots, idle_since=monotonic())
        world.wanted = lease is not None and (key.kind, lease.id) in self._wanted_leases
        self._manager.start(world)

    def _placed(self, spec: WorldSpec) -> WorldSpec:
        """Return `spec` with the fork server, node and address of each rank, if the session has several servers."""
        key = spec.key
        if self._layout.size == 1:
            return spec
        if not key.grouped:
            return replace(spec, servers=(key.server,))
        seats = self._layout.seats(key.ranks, key.nodes)
        nodes = tuple(seat.node for seat in seats)
        addresses = tuple(self._layout.nodes[node].address for node in nodes) if len(set(nodes)) > 1 else ()
        return replace(spec, servers=tuple(seat.server for seat in seats), nodes=nodes, addresses=addresses)

    def _release_slots(self, world: PooledWorld) -> None:
        slots, world.slots = world.slots, None
        if slots is not None:
            self._supply.broker(None).release(slots.id)

    def _retire_surplus(self) -> None:
        for world in surplus(self._manager.worlds.values(), max(_IDLE_RANKS, 2 * self._slots)):
            self._manager.retire(world)

    # Called by the world manager

    def on_started(self, world: PooledWorld) -> None:
        """Hand the world, whose processes have started, to its ticket."""
        ticket = world.ticket
        if ticket is None or ticket.cancelled:
            self._manager.kill(world)
            return
        if world.lease is not None:
            try:
                self._describe(world, world.lease)
            except LockFolderError as error:
                self._manager.kill(world)
                self._fail(ticket, error)
                return
        self._hand_over(world, ticket)

    def _describe(self, world: PooledWorld, lease: Lease) -> None:
        """Tell other sessions, on each node, which processes use its devices."""
        by_node: dict[int, list[int]] = {}
        for rank, pid in enumerate(world.pids):
            by_node.setdefault(world.spec.node_of(rank), []).append(pid)
        processes = [(pid, created) for pid in by_node[0] if (created := _created(pid)) is not None]
        self._supply.broker(world.spec.key.kind).describe(lease.id, processes=processes)
        for node, remote in world.remote_leases.items():
            self._far[node].describe(remote, tuple(by_node[node]))

    def on_not_started(self, world: PooledWorld, why: str) -> None:
        """Answer the world's ticket with the reason."""
        if world.ticket is not None:
            self._answer(world.ticket, PoolError(why))

    def on_lost(self, world: PooledWorld) -> None:
        """Request another world for the ticket; answer with an error if this was the second attempt."""
        ticket = world.ticket
        if ticket is None or ticket.cancelled:
            return
        if ticket.retried:
            text = f"the fork server ended twice while starting a world\n{self._manager.server_log()}"
            self._answer(ticket, PoolError(text))
        else:
            ticket.retried = True
            self._request(ticket)

    def on_gone(self, world: PooledWorld) -> None:
        """Return the leases of the world, whose processes have all ended."""
        self._release_slots(world)
        if world.lease is not None:
            self._supply.give_back(world.spec.key.kind, world.lease, killed=world.state == "killed")
        for node, lease in world.remote_leases.items():
            self._far[node].give_back(world.spec.key.kind, lease, killed=world.state == "killed")

    def on_failure(self, why: str) -> None:
        """Answer every waiting request with `why`."""
        for ticket in list(self._tickets.values()):
            with contextlib.suppress(Exception):
                self.cancel(ticket.id)
            with contextlib.suppress(Exception):
                self._answer(ticket, PoolError(why))

    def on_tick(self) -> None:
        """Refuse requests for devices that were set aside, and retire worlds that have been idle for `LINGER`."""
        for ticket in [ticket for ticket in self._tickets.values() if ticket.request is not None]:
            need = ticket.key.need
            unavailable = self._supply.lost(ticket.key.kind, need) if need is not None else None
            if unavailable is not None:
                self.cancel(ticket.id)
                self._answer(ticket, PoolError(unavailable))
        now = monotonic()
        for world in list(self._manager.worlds.values()):
            if world.state == "idle" and world.lease is not None and now - world.idle_since > LINGER:
                self._manager.retire(world)


def _created(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except (psutil.Error, OSError):
        return None  # The process has ended and uses no device; or this process has run out of file descriptors.
