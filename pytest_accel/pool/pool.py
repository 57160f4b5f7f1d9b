"""The one place in a session that owns leases and worlds. Lives in the controller."""

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
from pytest_accel.core.messages import SessionSpec, WorldSpec
from pytest_accel.core.world_key import WorldShape
from pytest_accel.diagnostics.diagnosis import Interrupted
from pytest_accel.forkserver.server_client import Spawn, spawn_here
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import in_words
from pytest_accel.leases.allocator import Supply
from pytest_accel.leases.broker import BrokerError
from pytest_accel.leases.lease_table import Lease
from pytest_accel.leases.lock_dir import LockFolderError
from pytest_accel.leases.locks import Holder
from pytest_accel.nodes.placement import HERE, Layout
from pytest_accel.nodes.remote_leases import FarLease, FarSupply, FarSupplyError
from pytest_accel.pool.multinode_lease import Gang, Near, Part, Source
from pytest_accel.pool.records import Grant, PooledWorld, PoolError, Ticket, surplus
from pytest_accel.pool.world_manager import Fleet

LINGER = 30.0
"""Seconds that a world without a test keeps its devices when nobody asks for them."""
_IDLE_RANKS = 16
"""Warm ranks that are kept without a test, or twice the CPU slots, whichever is more."""


class Pool:
    """Leases and worlds of one session. Thread-safe; nothing waits, answers come through callbacks."""

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
        far: Mapping[int, FarSupply] = MappingProxyType({}),
    ) -> None:
        """`slots` bounds the ranks that run on the CPU at once, except that a larger world runs alone.

        ``on_wanted(driver, world)`` is called when somebody waits for what a world at work holds. `waits_for_busy` is
        ``--accel-busy wait``. `servers` start the fork servers of which ranks come, and `layout` says where those are.
        `far` are the devices of the machines there that are not this one, by number.
        """
        self._machine = machine
        self._slots = slots
        self._measured = spec.coverage is not None
        self._on_wanted = on_wanted
        self._lock = threading.RLock()
        self._supply = Supply(machine, slots, self._lease_wanted, self._lease_lost, waits_for_busy=waits_for_busy)
        self._fleet = Fleet(spec, self._lock, self, servers)
        self._layout = layout
        self._far = far
        for node, source in far.items():
            source.on_wanted = partial(self._far_lease_wanted, node)
            source.on_lost = partial(self._far_lease_lost, node)
            source.on_failure = self._fleet.fail
        self._tickets: dict[int, Ticket] = {}
        self._wanted_leases: set[tuple[str | None, int]] = set()
        self._lost_leases: dict[tuple[str | int | None, int], str] = {}
        """Leases, by kind or machine and number, whose lock was lost before they had a world; and how."""
        self._numbers = 0

    # For drivers

    def warm(self) -> None:
        """Start the fork server, so that it imports while the tests are collected."""
        with self._lock, contextlib.suppress(OSError):  # A test that needs it fails with the reason.
            self._fleet.warm()

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have the fork server import `modules`, if it has no ranks yet and stays fit to fork."""
        with self._lock:
            self._fleet.preload(modules)

    def import_nothing_ahead(self, why: str) -> None:
        """Have ranks forked from a server that has imported nothing but torch and pytest; `why` is told with ``-v``."""
        with self._lock:
            self._fleet.import_nothing_ahead(why)

    def keep_out(self, modules: tuple[str, ...]) -> None:
        """Have ranks forked from a server that has not imported any of `modules` ahead."""
        with self._lock:
            self._fleet.keep_out(modules)

    def acquire(
        self, shape: WorldShape, holder: Holder, driver: object, answer: Callable[[Grant | PoolError], None]
    ) -> int:
        """Ask for a world of `shape`; gives a ticket for :meth:`cancel`. `answer` may be called before this returns."""
        with self._lock:
            self._numbers += 1
            ticket = Ticket(self._numbers, shape, holder, answer, driver)
            if self._fleet.broken is not None:
                self._answer(ticket, PoolError(self._fleet.broken))
                return ticket.id
            try:
                self._request(ticket)
            except Exception as error:
                ticket.cancelled = True
                self._fail(ticket, error)
            return ticket.id

    def cancel(self, ticket_id: int) -> None:
        """Nobody waits for this ticket any more."""
        with self._lock:
            ticket = self._tickets.pop(ticket_id, None)
            if ticket is None:
                return
            ticket.cancelled = True
            if ticket.gang is not None:
                ticket.gang.cancel()
            if ticket.request is not None:
                self._supply.broker(ticket.broker).cancel(ticket.request)

    def withdraw(self, ticket_id: int, why: str) -> None:
        """Answer with an error if the ticket still waits for devices; one that has them gets its world."""
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            if ticket is not None and ticket.gang is not None:
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
        """Return which test waits for what, and who has it, in one line; None if the ticket waits for no lease."""
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            if ticket is None:
                return None
            need, node = ticket.shape.need, 0
            if ticket.gang is not None:
                node, need, request = ticket.gang.waiting
            else:
                request = ticket.request
            if request is None:
                return None
            if need is None:
                count = min(ticket.shape.ranks, self._slots)
                what = f"{count} CPU slot{'' if count == 1 else 's'}"
            else:
                what = in_words(need, ticket.shape.kind)
            waits = f"{ticket.holder.test} waits for {what}"
            if node:
                return f"{waits} of the node {self._layout.nodes[node].name}"
            obstacles = self._supply.obstacles(ticket.broker, request)
            return None if obstacles is None else ": ".join(filter(None, (waits, "; ".join(obstacles))))

    def withdraw_waiting(self) -> list[str]:
        """Return what :meth:`waiting` says of each ticket that waits, and withdraw it."""
        with self._lock:
            lines = []
            for number in list(self._tickets):
                if (line := self.waiting(number)) is not None:
                    lines.append(line)
                    self.cancel(number)
            return lines

    def fail(self, why: str) -> None:
        """Answer whoever waits, and all later requests, with an error, and end all worlds.

        A thread of the session has ended; `why` says how.
        """
        self._fleet.fail(why)

    def release(self, number: int, harm: str | None, noticed: frozenset[int], worn: bool = False) -> None:
        """A driver gives its world back; `harm` says why it must end at once, `worn` that it must not run another test.

        With both it can end in good order. `noticed` are the ranks whose death the driver has reported in a test. One
        that died unnoticed is a complaint: somewhere a test killed it, and passed.
        """
        with self._lock:
            world = self._fleet.worlds.get(number)
            if world is None or world.state != "leased":
                return
            for rank, status in world.exits.items():
                if rank not in noticed:
                    self._fleet.complain(world, rank, status, "died after its last test had passed")
            world.ticket = None
            if world.exits or (harm is not None and not (worn and self._measured)):
                self._fleet.kill(world)
            elif world.shape.fresh or worn or self._fleet.closing:
                self._fleet.retire(world)
                if harm is not None:
                    world.state = "killed"  # How its sessions end after that is no complaint.
            else:
                world.state, world.idle_since = "idle", monotonic()
            # Now that it may be found idle: who waits for slots is answered within.
            self._release_slots(world)
            if world.state == "idle":
                if world.lease is None:
                    world.wanted = False
                elif world.wanted and not self._pass_on(world):
                    self._fleet.retire(world)
                self._keep_few_idle()

    def look_at_interrupted(self, number: int | None = None, test: str = "") -> None:
        """Note where the ranks are of world `number`, which runs `test`, or of all worlds that run one."""
        with self._lock:
            for world in list(self._fleet.worlds.values()):
                if world.state == "leased" and number in (None, world.spec.world):
                    self._fleet.look_at_interrupted(world, test)

    def watch_exit(self, number: int, rank: int, tell: Callable[[int | None], None]) -> None:
        """`tell` gets the rank's exit status when it has one; None where it cannot be known."""
        with self._lock:
            self._fleet.watch_exit(number, rank, tell)

    def driver_lost(self, driver: object) -> None:
        """A driver process has ended: what it waited for is withdrawn, what it held is ended."""
        with self._lock:
            for ticket in [ticket for ticket in self._tickets.values() if ticket.driver == driver]:
                self.cancel(ticket.id)
            for world in list(self._fleet.worlds.values()):
                if world.ticket is not None and world.ticket.driver == driver:
                    world.ticket.cancelled = True
                    if world.state == "leased":
                        self.release(world.spec.world, "its driver ended", frozenset(world.exits))

    def close(self, *, politely: bool) -> None:
        """End all worlds and the fork server; waits until every process is gone.

        `politely`: session fixtures are torn down first, and what they raise is among the complaints.
        """
        with self._lock:
            for ticket in list(self._tickets.values()):
                self.cancel(ticket.id)
            self._fleet.end_worlds(politely=politely)
        self._fleet.stop_server()
        with self._lock:
            self._supply.close()

    @property
    def complaints(self) -> list[str]:
        """What went wrong outside of any test, such as an error in a session fixture's end."""
        return self._fleet.complaints

    @property
    def interrupted(self) -> list[Interrupted]:
        """The tests that ran when the session was interrupted."""
        return self._fleet.interrupted

    @property
    def notes(self) -> list[str]:
        """What a person who asked for ``-v`` wants to know."""
        return self._fleet.notes

    # Leases

    def _lease_wanted(self, kind: str | None, lease: int) -> None:
        """`kind` None: `lease` is one on CPU slots."""
        with self._lock:
            self._wanted_leases.add((kind, lease))  # Its world may not have been made yet.
            for world in list(self._fleet.worlds.values()):
                held = world.slots if kind is None else world.lease if world.shape.kind == kind else None
                if held is None or held.id != lease:
                    continue
                world.wanted = True
                if world.state == "idle":
                    self._fleet.retire(world)
                elif world.state == "leased" and world.ticket is not None:
                    self._on_wanted(world.ticket.driver, world.spec.world)

    def _lease_lost(self, kind: str | None, lease: int, why: str) -> None:
        with self._lock:
            for world in list(self._fleet.worlds.values()):
                if world.shape.kind == kind and world.lease is not None and world.lease.id == lease:
                    self._fleet.revoke(world, why)
                    return
            self._lost_leases[kind, lease] = why

    def _far_lease_lost(self, node: int, number: int, why: str) -> None:
        with self._lock:
            for world in list(self._fleet.worlds.values()):
                if node in world.far and world.far[node].number == number:
                    self._fleet.revoke(world, why)
                    return
            self._lost_leases[node, number] = why

    def _far_lease_wanted(self, node: int, number: int) -> None:
        with self._lock:
            for world in list(self._fleet.worlds.values()):
                if node in world.far and world.far[node].number == number and world.lease is not None:
                    self._lease_wanted(world.shape.kind, world.lease.id)

    def _request(self, ticket: Ticket) -> None:
        """A warm world for `ticket`, or a place in the queue for what a new one needs."""
        shape, holder = ticket.shape, ticket.holder
        self._tickets[ticket.id] = ticket
        granted = partial(self._granted, ticket)
        if shape.need is None:
            slots = min(shape.ranks, self._slots)
            ticket.request = self._supply.broker(None).submit((), 0, holder, granted, slots=slots)
            return
        broker = self._supply.broker(shape.kind)
        world = self._fleet.idle(shape)
        if world is not None and world.lease is not None:
            broker.describe(world.lease.id, test=holder.test)
            self._hand_over(world, ticket)
            return
        needs = shape.needs([seat.node for seat in self._layout.seats(shape.ranks, shape.nodes)] if self._far else [0])
        if len(needs) > 1:
            self._request_of_several(ticket, needs)
            return
        lost = self._supply.lost(shape.kind, shape.need)
        if lost is not None:
            self._answer(ticket, PoolError(lost))
            return
        ticket.request = self._supply.submit(shape.kind, shape.need, holder, granted, partial(self._fail, ticket))

    def _request_of_several(self, ticket: Ticket, needs: Mapping[int, DeviceNeed]) -> None:
        sources: dict[int, Source] = {0: Near(self._supply), **self._far}
        parts = [Part(node, sources[node], needs[node]) for node in self._layout.order(needs)]
        granted, failed = partial(self._granted_of_several, ticket), partial(self._fail, ticket)
        ticket.gang = Gang(self._lock, ticket.shape.kind, parts, ticket.holder, granted, failed)
        ticket.gang.ask()

    def _granted_of_several(self, ticket: Ticket, leases: dict[int, Any]) -> None:
        ticket.gang = None
        near = leases.pop(0)
        try:
            self._start(ticket, near, None, leases)
        except Exception as error:
            self._fail(ticket, error)
            self._supply.give_back(ticket.shape.kind, near, killed=False)
            for node, lease in leases.items():
                self._far[node].give_back(ticket.shape.kind, lease, killed=False)

    def _granted(self, ticket: Ticket, lease: Lease) -> None:
        with self._lock:
            if ticket.cancelled or self._fleet.closing:
                self._supply.broker(ticket.broker).release(lease.id)
                return
            try:
                self._use(ticket, lease)
            except Exception as error:  # In a thread of the broker it would be nobody's, and the driver would wait.
                self._fail(ticket, error)  # First: what follows from the release may raise as well.
                self._supply.broker(ticket.broker).release(lease.id)

    def _use(self, ticket: Ticket, lease: Lease) -> None:
        if ticket.shape.need is not None:
            self._start(ticket, lease, None)
            return
        world = self._fleet.idle(ticket.shape)
        if world is None:
            self._start(ticket, None, lease)
        else:
            world.slots = lease
            self._hand_over(world, ticket)

    # Worlds

    def _hand_over(self, world: PooledWorld, ticket: Ticket) -> None:
        warm = world.state != "starting"
        world.state, world.ticket = "leased", ticket
        self._answer(ticket, Grant(world.spec, world.pids, self._fleet.directory, warm))
        if world.wanted:  # Said while it was being started, and said only once.
            self._on_wanted(ticket.driver, world.spec.world)

    def _pass_on(self, world: PooledWorld) -> bool:
        """Hand a world that others wait for to the one whose turn it is, if that one wants a world like it."""
        assert world.lease is not None
        # Not idle: whoever still waits is told of within, and must not end it.
        world.state, world.wanted = "leased", False
        for ticket in self._tickets.values():
            if ticket.shape == world.shape and ticket.request is not None:
                if self._supply.broker(world.shape.kind).pass_on(world.lease.id, ticket.request):
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
        far: Mapping[int, FarLease] = MappingProxyType({}),
    ) -> None:
        shape = ticket.shape
        held: list[tuple[str | int | None, int]] = [(node, one.number) for node, one in far.items()]
        held += [(shape.kind, lease.id)] if lease is not None else []
        for one in held:
            if one in self._lost_leases:
                raise LockFolderError(self._lost_leases[one])
        ids = lease.devices if lease else ()
        by_id = {device.id: device for device in self._machine.of(shape.kind).devices} if ids else {}
        self._numbers += 1
        argument = self._machine.argument(shape.kind)
        devices = [by_id[name] for name in ids]
        devices += [device for node in sorted(far) for device in far[node].devices]
        spec = shape.spec(self._numbers, tuple(devices), argument)
        if self._layout.size > 1:
            spec = self._seated(spec, shape)
        world = PooledWorld(spec, shape, "starting", ticket, lease, dict(far), slots, idle_since=monotonic())
        world.wanted = lease is not None and (shape.kind, lease.id) in self._wanted_leases
        self._fleet.start(world)

    def _seated(self, spec: WorldSpec, shape: WorldShape) -> WorldSpec:
        if not shape.grouped:
            return replace(spec, servers=(shape.server,))
        seats = self._layout.seats(shape.ranks, shape.nodes)
        nodes = tuple(seat.node for seat in seats)
        addresses = tuple(self._layout.nodes[node].address for node in nodes) if len(set(nodes)) > 1 else ()
        return replace(spec, servers=tuple(seat.server for seat in seats), nodes=nodes, addresses=addresses)

    def _release_slots(self, world: PooledWorld) -> None:
        slots, world.slots = world.slots, None
        if slots is not None:
            self._supply.broker(None).release(slots.id)

    def _keep_few_idle(self) -> None:
        for world in surplus(self._fleet.worlds.values(), max(_IDLE_RANKS, 2 * self._slots)):
            self._fleet.retire(world)

    # What the fleet tells

    def on_started(self, world: PooledWorld) -> None:
        """Its processes are there: it is the ticket's that it was started for."""
        ticket = world.ticket
        if ticket is None or ticket.cancelled:
            self._fleet.kill(world)
            return
        if world.lease is not None:
            try:
                self._describe(world, world.lease)
            except LockFolderError as error:
                self._fleet.kill(world)
                self._fail(ticket, error)
                return
        self._hand_over(world, ticket)

    def _describe(self, world: PooledWorld, lease: Lease) -> None:
        """Say on each machine which processes use its devices."""
        by_node: dict[int, list[int]] = {}
        for rank, pid in enumerate(world.pids):
            by_node.setdefault(world.spec.node_of(rank), []).append(pid)
        processes = [(pid, created) for pid in by_node[0] if (created := _created(pid)) is not None]
        self._supply.broker(world.shape.kind).describe(lease.id, processes=processes)
        for node, there in world.far.items():
            self._far[node].describe(there, tuple(by_node[node]))

    def on_not_started(self, world: PooledWorld, why: str) -> None:
        """Its ticket gets the reason in its place."""
        if world.ticket is not None:
            self._answer(world.ticket, PoolError(why))

    def on_lost(self, world: PooledWorld) -> None:
        """Its ticket gets another, once."""
        ticket = world.ticket
        if ticket is None or ticket.cancelled:
            return
        if ticket.retried:
            text = f"the fork server ended twice while starting a world\n{self._fleet.server_log()}"
            self._answer(ticket, PoolError(text))
        else:
            ticket.retried = True
            self._request(ticket)

    def on_gone(self, world: PooledWorld) -> None:
        """What it held goes to those who wait."""
        self._release_slots(world)
        if world.lease is not None:
            self._supply.give_back(world.shape.kind, world.lease, killed=world.state == "killed")
        for node, lease in world.far.items():
            self._far[node].give_back(world.shape.kind, lease, killed=world.state == "killed")

    def on_failure(self, why: str) -> None:
        """Answer every waiting request with `why`."""
        for ticket in list(self._tickets.values()):
            with contextlib.suppress(Exception):
                self.cancel(ticket.id)
            with contextlib.suppress(Exception):
                self._answer(ticket, PoolError(why))

    def on_tick(self) -> None:
        """Devices that nobody uses are given back, and who waits for some that were set aside is told."""
        for ticket in [ticket for ticket in self._tickets.values() if ticket.request is not None]:
            need = ticket.shape.need
            lost = self._supply.lost(ticket.shape.kind, need) if need is not None else None
            if lost is not None:
                self.cancel(ticket.id)
                self._answer(ticket, PoolError(lost))
        now = monotonic()
        for world in list(self._fleet.worlds.values()):
            if world.state == "idle" and world.lease is not None and now - world.idle_since > LINGER:
                self._fleet.retire(world)


def _created(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except (psutil.Error, OSError):
        return None  # It has died already, and cannot be using a device; or this process has no file descriptor left.
