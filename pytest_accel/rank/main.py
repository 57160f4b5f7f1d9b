"""A rank: one process of a world, from the fork to its end, and what it knows of itself."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from os import getpid
from types import SimpleNamespace
from typing import IO

import pytest

from pytest_accel.core import plugin_roles, prctl
from pytest_accel.core.messages import RETIRED, SessionSpec, with_options
from pytest_accel.core.metadata_cache import Installed
from pytest_accel.core.paths import stack_path
from pytest_accel.core.shared_memory import Watch
from pytest_accel.core.signals import STACK_SIGNAL
from pytest_accel.core.world_key import backend_names
from pytest_accel.hardware.vendors.cpu import threads_beside_ccl
from pytest_accel.rank import coverage, flight_recorder, process_group, rank_environment, rank_log, rank_plugin
from pytest_accel.rank.context import RankContext
from pytest_accel.rank.role import Role


class _Joining:
    """Lets pytest come as far as it can without knowing which rank this is: its own plugins are loaded, no others."""

    def __init__(self, session: SessionSpec, wait_for_role: Callable[[], Role], installed: Installed) -> None:
        self.plugin: rank_plugin.RankPlugin | None = None
        self.args = list(session.args)
        """The list that pytest is given, and has not read yet when it registers this."""
        self._session = session
        self._wait_for_role = wait_for_role
        self._installed = installed
        self._stacks: IO[str] | None = None
        """Open as long as the process."""

    def pytest_addoption(self, pluginmanager: pytest.PytestPluginManager) -> None:
        """pytest calls this when it registers the plugins that it was given, before it looks at anything else."""
        session, (spec, rank, listener, peers, meeting) = self._session, self._wait_for_role()
        rank_log.redirect(session, spec.world, rank)
        self._stacks = open(stack_path(session.directory, spec.world, rank), "w")  # noqa: SIM115
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)
        starting = contextlib.ExitStack()
        starting.enter_context(self._installed.remembered())
        context = RankContext(session, spec, rank)
        _set_environment(context, meeting)
        coverage.start(session.coverage if session.shared else None, pluginmanager)
        if context.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, context.cores)
        os.makedirs(session.basetemp, mode=0o700, exist_ok=True)
        basetemp = os.path.join(session.basetemp, f"w{spec.world}r{rank}")
        self.args[:] = with_options(self.args, ["--basetemp", basetemp])
        self.plugin = rank_plugin.RankPlugin(context, listener, peers, meeting, starting)
        plugin_roles.install(pluginmanager, dict(session.roles))
        pluginmanager.register(self.plugin)


def run(session: SessionSpec, wait_for_role: Callable[[], Role], installed: Installed, watch: Watch) -> int:
    """Be the rank that `wait_for_role` says until the driver or the pool ends it; gives the exit status."""
    flight_recorder.prepare()
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # Until there is a file for them: it is not to end the process.
    prctl.become_subreaper()
    os.chdir(session.invocation_dir)
    sys.path[:] = session.sys_path
    sys.argv[:] = ["pytest", *session.args]
    # A test may replace these, which the connection to the driver looks up in their module for each message.
    connection.struct = SimpleNamespace(pack=struct.pack, unpack=struct.unpack)  # type: ignore[attr-defined]
    _reseed()
    _let_the_driver_finish()
    joining = _Joining(session, wait_for_role, installed)
    code = pytest.main(joining.args, plugins=[joining])
    plugin = joining.plugin
    if plugin is None:
        return int(code)
    with suppress(Exception):  # A test may have replaced what this needs, and the fork server looks as well.
        watch.look({getpid(): plugin.context.spec.world})
    if not plugin.served:
        plugin.refuse(f"pytest ended with exit status {code} before it could run a test")
    # A retired rank's tests have been judged one by one; a session that cannot end raises.
    judged = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.TESTS_FAILED)
    return RETIRED if plugin.retired and code in judged else int(code)


def _let_the_driver_finish() -> None:
    """A rank that is woken does not take the processor from the driver, which has other ranks still to wake.

    SCHED_BATCH says so (sched(7)): it costs nothing else. What the rank starts is scheduled as usual.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def _reseed() -> None:
    """Random state of its own for each process, as fresh interpreters have; torch seeds all with the same constant."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _set_environment(context: RankContext, meeting: process_group.Meeting | None) -> None:
    spec, rank = context.spec, context.rank
    changes: dict[str, str | None] = dict(context.session.hidden)
    if context.seen or spec.kind != "cpu":
        # A CPU slot is no device that other ranks could see: threads and cores are for this rank's own.
        changes |= context.vendor.mask(context.own if context.cores else context.seen, os.environ)
    if context.cores and "OMP_NUM_THREADS" in changes and "ccl" in backend_names(spec.backend):
        changes["OMP_NUM_THREADS"] = str(threads_beside_ccl(len(context.cores), {**os.environ, **dict(spec.env)}))
    if spec.grouped:
        assert meeting is not None
        changes |= rank_environment.environment(spec, rank, meeting.port)
        if context.session.debug:
            changes["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        if spec.ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            changes.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, for the same reason.
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    for name, value in {**changes, **dict(spec.env)}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
        # As bytes, which are compared after each test.
        context.variables[os.fsencode(name)] = None if value is None else os.fsencode(value)
