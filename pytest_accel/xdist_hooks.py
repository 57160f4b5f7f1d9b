"""Hooks of the controller for xdist's workers. Registered only if xdist distributes the tests."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel import features
from pytest_accel.core.source_files import for_worker
from pytest_accel.session import AccelSession

if TYPE_CHECKING:
    from pytest_accel.pool.pool_client import Channel
    from pytest_accel.pool.worker_driver import WorkerDriver


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
                spec.env.update(for_worker(config, {**os.environ, **spec.env}))
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
        node.workerinput["accel_machine"] = pickle.dumps(machine)
        channel = node.gateway.newchannel()
        node.workerinput["accel_channel"] = channel
        self._serve_pool(channel)

    def _serve_pool(self, channel: Channel) -> None:
        """Answer a worker's messages. The modules of the pool are imported at the first message."""
        driver: WorkerDriver | None = None

        def receive(data: bytes | None) -> None:
            nonlocal driver
            if driver is None:
                if data is None:  # The worker has ended and had no message.
                    return
                from pytest_accel.pool.worker_driver import WorkerDriver

                pool, show = lambda: self._session.pool, self._session.show
                driver = WorkerDriver(channel, pool, show)
            driver.receive(data)

        channel.setcallback(receive, endmarker=None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self) -> None:
        """Call the features: a worker's first request to the pool arrives before the list of its tests."""
        if self._session.started_pool is not None:
            features.register(self._session.config, "marked")
            self._session.config.hook.pytest_accel_workers_collected(session=self._session)
