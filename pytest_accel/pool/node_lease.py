"""Leases of devices of one node or of CPU slots, the requests for them, and notices about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import psutil

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.units import count_text
from pytest_accel.features.launchers.remote_leases import RemoteLease, RemoteLeases
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import in_words
from pytest_accel.leases.allocator import Allocator
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lease_table import Lease
from pytest_accel.pool.placement import UnfitDevicesError


class LeaseId(NamedTuple):
    """Identifies a lease in the session."""

    source: str | int | None
    """The kind of devices of this node, the number of another node, or None for CPU slots."""
    number: int


class UnfitNodeError(Exception):
    """The devices that a cluster has reserved on a node do not meet the need; the message says why."""

    def __init__(self, node: int, text: str) -> None:
        """`node` is the number of the node in the session."""
        super().__init__(text)
        self.node = node


class LeaseNotices:
    """Notices about leases that no world holds yet.

    A notice may precede the callback for the grant, and a world may wait for leases of other nodes. A notice is
    forgotten when a world takes the lease, or when the lease is returned.
    """

    def __init__(self) -> None:
        self._wanted: set[LeaseId] = set()
        self._lost: dict[LeaseId, str] = {}

    def add_wanted(self, lease: LeaseId) -> None:
        """Note that another request waits for what `lease` holds."""
        self._wanted.add(lease)

    def add_lost(self, lease: LeaseId, why: str) -> None:
        """Note that the lock of a device of `lease` was lost."""
        self._lost[lease] = why

    def lost(self, lease: LeaseId) -> str | None:
        """Return why `lease` must not be used, or None."""
        return self._lost.get(lease)

    def take_wanted(self, lease: LeaseId) -> bool:
        """Return whether another request waits for what `lease` holds, and forget that."""
        wanted = lease in self._wanted
        self._wanted.discard(lease)
        return wanted

    def forget(self, lease: LeaseId) -> None:
        """Forget all notices about `lease`, which is returned."""
        self._wanted.discard(lease)
        self._lost.pop(lease, None)


class NodeLease(Protocol):
    """A lease of devices of one node, or of CPU slots."""

    @property
    def id(self) -> LeaseId: ...

    @property
    def devices(self) -> tuple[Device, ...]: ...

    def describe(self, pids: Sequence[int]) -> None:
        """Tell other sessions which processes use the devices."""

    def give_back(self, *, killed: bool = False) -> None:
        """Return the lease, which no process uses any more; `killed` if the processes that used it were killed."""


class NodeRequest(Protocol):
    """A request for a :class:`NodeLease`. It is submitted once."""

    @property
    def node(self) -> int:
        """The number of the node in the session."""

    @property
    def what(self) -> str:
        """The requested devices or slots, in words."""

    @property
    def unavailable(self) -> str | None:
        """Why the request can never be granted, or None."""

    def submit(
        self, holder: Holder, on_grant: Callable[[NodeLease], None], on_failure: Callable[[Exception], None]
    ) -> None:
        """Queue the request. The callbacks may run before this returns, and in any thread."""

    def cancel(self) -> bool:
        """Cancel the request; return False if it does not wait any more."""

    def obstacles(self) -> list[str] | None:
        """Return a line for each known reason why the request waits; None if it does not wait any more."""

    def take_over(self, lease: NodeLease) -> bool:
        """Take `lease` from its holder, without a call of `on_grant`, if the request is first in the queue for it.

        Return True if done.
        """


@dataclass(frozen=True, slots=True)
class LocalNodeLease:
    """A lease on devices of the controller's own node, or on CPU slots."""

    allocator: Allocator
    notices: LeaseNotices
    kind: str | None
    """The kind of the devices; None for CPU slots."""
    lease: Lease
    devices: tuple[Device, ...] = ()

    @property
    def id(self) -> LeaseId:
        return LeaseId(self.kind, self.lease.id)

    def describe(self, pids: Sequence[int]) -> None:
        processes = [(pid, created) for pid in pids if (created := _created(pid)) is not None]
        self.allocator.broker(self.kind).describe(self.lease.id, processes=processes)

    def give_back(self, *, killed: bool = False) -> None:
        self.notices.forget(self.id)
        self.allocator.give_back(self.kind, self.lease, killed=killed)


@dataclass(slots=True, eq=False)
class SlotsRequest:
    """A request for CPU slots."""

    allocator: Allocator
    notices: LeaseNotices
    count: int
    node = 0
    unavailable = None
    number: int = 0
    """The number of the request at the broker, once it is submitted."""

    @property
    def what(self) -> str:
        return count_text(self.count, "CPU slot")

    def submit(
        self, holder: Holder, on_grant: Callable[[NodeLease], None], on_failure: Callable[[Exception], None]
    ) -> None:
        def granted(lease: Lease) -> None:
            on_grant(LocalNodeLease(self.allocator, self.notices, None, lease))

        self.number = self.allocator.broker(None).submit((), 0, holder, granted, slots=self.count)

    def cancel(self) -> bool:
        return self.allocator.broker(None).cancel(self.number)

    def obstacles(self) -> list[str] | None:
        return self.allocator.obstacles(None, self.number)

    def take_over(self, lease: NodeLease) -> bool:
        return False


@dataclass(slots=True, eq=False)
class LocalNodeRequest:
    """A request for devices of the controller's own node."""

    allocator: Allocator
    notices: LeaseNotices
    machine: Machine
    kind: str
    need: DeviceNeed
    node = 0
    number: int = 0
    """The number of the request at the broker, once it is submitted."""

    @property
    def what(self) -> str:
        return in_words(self.need, self.kind)

    @property
    def unavailable(self) -> str | None:
        return self.allocator.unavailable(self.kind, self.need)

    def submit(
        self, holder: Holder, on_grant: Callable[[NodeLease], None], on_failure: Callable[[Exception], None]
    ) -> None:
        by_id = {device.id: device for device in self.machine.of(self.kind).devices}

        def granted(lease: Lease) -> None:
            devices = tuple(by_id[name] for name in lease.devices)
            on_grant(LocalNodeLease(self.allocator, self.notices, self.kind, lease, devices))

        self.number = self.allocator.submit(self.kind, self.need, holder, granted, on_failure)

    def cancel(self) -> bool:
        return self.allocator.broker(self.kind).cancel(self.number)

    def obstacles(self) -> list[str] | None:
        return self.allocator.obstacles(self.kind, self.number)

    def take_over(self, lease: NodeLease) -> bool:
        return lease.id.source == self.kind and self.allocator.broker(self.kind).pass_on(lease.id.number, self.number)


@dataclass(frozen=True, slots=True)
class RemoteNodeLease:
    """A lease on devices of another node."""

    leases: RemoteLeases
    notices: LeaseNotices
    node: int
    lease: RemoteLease

    @property
    def id(self) -> LeaseId:
        return LeaseId(self.node, self.lease.number)

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.lease.devices

    def describe(self, pids: Sequence[int]) -> None:
        self.leases.describe(self.lease, tuple(pids))

    def give_back(self, *, killed: bool = False) -> None:
        self.notices.forget(self.id)
        self.leases.give_back(self.lease, killed=killed)


@dataclass(slots=True, eq=False)
class RemoteNodeRequest:
    """A request for devices of another node."""

    leases: RemoteLeases
    notices: LeaseNotices
    node: int
    kind: str
    need: DeviceNeed
    mask: str | None = None
    """Mask that shows the only devices to lease, see :class:`LeaseRequest`; None: any devices."""
    unavailable = None
    number: int = 0
    """The number of the request at the node's agent, once it is submitted."""

    @property
    def what(self) -> str:
        return f"{in_words(self.need, self.kind)} of the node {self.leases.name}"

    def submit(
        self, holder: Holder, on_grant: Callable[[NodeLease], None], on_failure: Callable[[Exception], None]
    ) -> None:
        def granted(lease: RemoteLease) -> None:
            on_grant(RemoteNodeLease(self.leases, self.notices, self.node, lease))

        def failed(error: Exception) -> None:
            on_failure(UnfitNodeError(self.node, str(error)) if isinstance(error, UnfitDevicesError) else error)

        self.number = self.leases.submit(self.kind, self.need, holder, granted, failed, self.mask)

    def cancel(self) -> bool:
        self.leases.cancel(self.number)
        return True

    def obstacles(self) -> list[str] | None:
        return []  # Only the node's agent knows them.

    def take_over(self, lease: NodeLease) -> bool:
        return False


def _created(pid: int) -> float | None:
    """Return the creation time of a process; None if it cannot be found out."""
    try:
        return psutil.Process(pid).create_time()
    except (psutil.Error, OSError):
        return None  # The process has ended and uses no device; or this process has run out of file descriptors.
