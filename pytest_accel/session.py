"""State of the plugin in one pytest process: settings, machine, access to the pool, driver of the marked items."""

from __future__ import annotations

import contextlib
import threading
from functools import cached_property
from os import getpid
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel import features
from pytest_accel.core.stash_keys import LAUNCHED
from pytest_accel.settings.options import Settings, planned_machine

if TYPE_CHECKING:
    from pytest_accel.core.world_key import WorldKey
    from pytest_accel.driver.driver import Driver
    from pytest_accel.driver.item_plan import LaunchedProcesses
    from pytest_accel.hardware.inventory import Machine
    from pytest_accel.messages.world_spec import WorldSpec
    from pytest_accel.pool.pool import Pool
    from pytest_accel.pool.pool_client import PoolClient
    from pytest_accel.pool.starter import ClusterConnection
    from pytest_accel.session_pool import DriverCoverage


class AccelSession:
    """The plugin's objects in one driver or controller; stored on the config under `stash_keys.SESSION`.

    Machine, pool, pool client and driver are created on first use. A session without marks creates no pool, pool client
    or driver.
    """

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self._pid = getpid()
        self._pool_lock = threading.Lock()
        self._pool: Pool | None = None
        self._coverage: DriverCoverage | None = None
        """The coverage of the pool's ranks; None if this process is not measured."""
        self._cluster: ClusterConnection | None = None
        self._driver: Driver | None = None
        self.skipped_files: list[str] = []
        """Files with marked tests that have skipped themselves since only ranks have a variable, each with its line."""
        self.next_is_hint = False
        """True if the next test of this xdist worker is only likely: another worker may get it."""

    @property
    def worker_input(self) -> dict[str, Any] | None:
        """The data that xdist's controller has sent to this worker; None in a process that is not a worker."""
        return getattr(self.config, "workerinput", None)

    @property
    def is_forked_copy(self) -> bool:
        """True in a process forked from the session's, such as a child of a test that has returned from the test."""
        return getpid() != self._pid

    @property
    def is_worker(self) -> bool:
        """True if this process is an xdist worker."""
        return self.worker_input is not None

    @cached_property
    def machine(self) -> Machine:
        """The devices of this machine, of the cluster, or of the machine that ``--accel-plan`` assumes.

        A worker uses the controller's.

        Access raises :class:`pytest.UsageError` if the settings do not fit the machine.
        """
        if self.worker_input is not None:
            import pickle  # Imported here because a session without marks does not need it.

            received: Machine = pickle.loads(self.worker_input["accel_machine"])
            return received
        if (planned := planned_machine(self.config)) is not None:
            from pytest_accel.hardware.inventory import PretendedMachine

            kind, count = planned
            return PretendedMachine(count, kind, dict(self.settings.resources))
        return self.own_machine if self.cluster is None else self.cluster.machine

    @cached_property
    def own_machine(self) -> Machine:
        """The devices of this machine, in the controller. Access raises the errors of :attr:`machine`."""
        from pytest_accel.settings.options import machine_for

        try:
            machine = machine_for(self.settings)
            _ = machine.session
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        return machine

    @property
    def cluster(self) -> ClusterConnection | None:
        """The cluster of the session, in the controller; None without ``--accel-cluster``.

        The first access connects to the cluster, and raises :class:`pytest.UsageError` if that is not possible.
        """
        if self._cluster is None and self.settings.cluster is not None:
            self._cluster = features.require(self.config, "cluster").pytest_accel_connect_cluster(session=self)
        return self._cluster

    @property
    def pool(self) -> Pool:
        """The session's pool; only in the controller."""
        # The lock is needed because the threads that receive the workers' requests use the pool, too.
        with self._pool_lock:
            if self._pool is None:
                from pytest_accel.session_pool import make_pool

                self._pool, self._coverage = make_pool(
                    self.config, self.settings, self.machine, self.own_machine, self.cluster, self.show
                )
            return self._pool

    @property
    def started_pool(self) -> Pool | None:
        """The session's pool if something has used it; None in a forked copy, whose original owns the pool."""
        return None if self.is_forked_copy else self._pool

    @property
    def launched(self) -> LaunchedProcesses | None:
        """The other processes of this process's launcher; None without a launcher."""
        return self.config.stash.get(LAUNCHED, None)

    @cached_property
    def pool_client(self) -> PoolClient:
        """This process's access to the pool, which is in the controller."""
        if self.worker_input is not None:
            from pytest_accel.pool.pool_client import PoolClient

            return PoolClient.over(self.worker_input["accel_channel"])
        from pytest_accel.pool.pool import client_here

        return client_here(self.pool)

    @property
    def driver(self) -> Driver:
        """The object that runs this process's marked items."""
        if self._driver is None:
            from pytest_accel.driver.driver import Driver

            self._driver = Driver(self.config, self.settings, self.pool_client, self.machine.session_kind)
        return self._driver

    def lease(self, key: WorldKey, test: str) -> WorldSpec:
        """Wait for devices that this process is to use in `test`, and return the world, without ranks, that has them.

        Raise an error that says why the test cannot run if the pool cannot provide them.
        """
        from pytest_accel.leases.shared_folder import PlaceError
        from pytest_accel.verdict import phase_verdict

        # Two drivers could wait for each other: one has a world and waits for a lease, the other has the lease and
        # waits for the devices of the world.
        if self._driver is not None:
            self._driver.close()
        try:
            return self.pool_client.acquire(key, test).spec
        except PlaceError as error:
            raise phase_verdict.not_run(str(error)) from None

    def end_lease(self, spec: WorldSpec) -> None:
        """Return devices that `lease` has returned; no-op in a child that the test has forked, which holds nothing."""
        from pytest_accel.pool.pool_client import GiveBackWorld

        if not self.is_forked_copy:
            self.pool_client.give_back(GiveBackWorld(spec.world))

    def close(self, *, gracefully: bool) -> None:
        """Return this process's world to the pool; in the controller, close the pool and its processes.

        With `gracefully`, session fixtures in the ranks are torn down first.
        """
        if self.is_forked_copy:
            return  # The world and the pool belong to the original process.
        if self._driver is not None:
            self._driver.close()
        try:
            if self._pool is not None:
                self._pool.close(gracefully=gracefully)
        finally:
            for problem in () if self._coverage is None else self._coverage.combine():
                self.show(f"accel: coverage of ranks is incomplete: {problem}")
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                cluster.close()

    def show(self, line: str) -> None:
        """Write a line to the terminal of the controller; any thread may call this method."""
        from pytest_accel.core.terminal_lines import write_line

        with contextlib.suppress(OSError, ValueError):  # A closed terminal must not keep the worlds from running.
            write_line(self.config, line)
