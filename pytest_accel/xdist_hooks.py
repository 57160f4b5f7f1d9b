"""Hooks of the controller for xdist's workers, and their drivers. Registered only if xdist distributes the tests."""

from __future__ import annotations

from contextlib import suppress
from os import environ
from pickle import dumps
from traceback import format_exc
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel import features
from pytest_accel.core.source_files import for_worker
from pytest_accel.session import AccelSession

if TYPE_CHECKING:
    from execnet import Channel

    from pytest_accel.pool.pool_client import PoolMessage


class XdistHooks:
    """Gives each worker its mask and a channel to the pool."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, config: pytest.Config, specs: list[Any]) -> None:
        """Tell each worker where the suite is, and mask the devices that unmarked tests see there.

        Each worker sees all of the session's devices, and another device first.
        A replacement for a crashed worker is made from the same spec and keeps the mask.
        """
        for spec in specs:
            if spec.popen and not spec.chdir:  # Otherwise xdist makes the arguments relative to another root.
                spec.env.update(for_worker(config, {**environ, **spec.env}))
        machine = self._session.own_machine  # Unmarked tests run here, also if marked tests run on a cluster.
        devices = machine.session.devices
        if not devices:
            return
        vendor = machine.vendor(machine.session.kind)
        for number, spec in enumerate(specs):
            changes = vendor.mask((*devices[number % len(devices) :], *devices[: number % len(devices)]), {})
            spec.env.update({name: value for name, value in changes.items() if value is not None})

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        # Send the detected devices: because of its mask, a worker may see fewer devices than the session can lease.
        machine = self._session.machine
        _ = machine.session  # Detect the devices before the machine is serialized.
        node.workerinput["accel_machine"] = dumps(machine)
        channel = node.workerinput["accel_channel"] = node.gateway.newchannel()
        channel.setcallback(WorkerDriver(self._session, channel).receive, endmarker=None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self) -> None:
        """Call the features: a worker's first request to the pool arrives before the list of its tests."""
        if self._session.started_pool is not None:
            features.register(self._session.config, "marked")
            self._session.config.hook.pytest_accel_workers_collected(session=self._session)


class WorkerDriver:
    """The driver of an xdist worker, whose messages arrive in execnet's receiver thread.

    The modules of the pool are imported at the first message.
    """

    def __init__(self, session: AccelSession, channel: Channel) -> None:
        self._session = session
        self._channel = channel

    def handle(self, message: PoolMessage) -> None:
        """Send a message of the pool to the worker."""
        from pytest_accel.messages.struct_messages import encode

        with suppress(OSError):  # The worker has ended; the end marker follows.
            self._channel.send(encode(message))

    def receive(self, data: bytes | None) -> None:
        """Handle a serialized message of the worker; `data` is None if the worker has ended."""
        if data is None:
            if (started := self._session.started_pool) is not None:
                started.post(started.driver_lost, self)
            return
        from pytest_accel.leases.demand import WorldDemand
        from pytest_accel.messages.struct_messages import decode
        from pytest_accel.pool.pool_client import Answer, DriverMessage, ShowLine

        message: DriverMessage | None = None
        try:
            message = decode(data, DriverMessage)
            if isinstance(message, ShowLine):
                self._session.show(message.line)
            else:
                pool = self._session.pool
                pool.post(pool.serve, self, message)
        except BaseException:  # execnet would hide the error: answer the request with it, and fail the pool.
            why = f"a request of an xdist worker has ended with an error:\n{format_exc().rstrip()}"
            if isinstance(message, WorldDemand):
                self.handle(Answer(message.number, why))
            if (started := self._session.started_pool) is not None:
                started.post(started.broken_by, why)
