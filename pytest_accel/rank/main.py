"""Entry point of a rank: prepares the forked process, runs its pytest session, and returns its exit status."""

from __future__ import annotations

import os
import sys
from multiprocessing import process
from os import getpid

import msgspec
import pytest

from pytest_accel.core import log, processes
from pytest_accel.core.session_folder import inner_lock_folder
from pytest_accel.hardware.held_devices import HELD, HeldDevices
from pytest_accel.leases.shared_folder import default_folder
from pytest_accel.messages.rank_messages import FAILED_BY_HOOK, RETIRED, CannotRun
from pytest_accel.messages.session_spec import SessionSpec, with_options
from pytest_accel.messages.world_spec import Role, worker_environment
from pytest_accel.rank import process_group, torch_devices
from pytest_accel.rank.context import RankContext
from pytest_accel.rank.rank_plugin import RankPlugin


def run(session: SessionSpec, role: Role) -> int:
    """Run this process as the rank with this `role`; return the exit status of the process."""
    processes.become_subreaper()
    os.chdir(session.invocation_dir)
    sys.path[:] = session.sys_path
    sys.argv[:] = ["pytest", *session.args]
    # The folder of multiprocessing's sockets. A killed process does not remove its own, which would stay in TMPDIR.
    process.current_process()._config["tempdir"] = session.directory  # type: ignore[attr-defined]
    # With the same key, a rank could connect to other ranks' managers of `multiprocessing` without having their keys.
    process.current_process().authkey = os.urandom(32)
    torch_devices.reseed()
    plugin = _become_rank(session, role)
    basetemp = os.path.join(session.basetemp, f"accel-w{role.spec.world}r{role.rank}")
    code = pytest.main([*with_options(session.args, ["--basetemp", basetemp])], plugins=[plugin])
    log.step("its pytest session has ended with status %d", code)
    if not plugin.served:
        plugin.refuse(CannotRun(f"pytest ended with exit status {code} before it could run a test"))
    return _status(plugin, code) if plugin.retired else int(code)


def _become_rank(session: SessionSpec, role: Role) -> RankPlugin:
    """Take on the `role`, and return the plugin of this rank."""
    spec, rank = role.spec, role.rank
    log.start(f"rank {rank} of world {spec.world}")
    log.step("starts; its parent is process %d", os.getppid())
    context = RankContext(session, spec, rank)
    plugin = RankPlugin(context, role)
    _set_environment(context, role.port)
    torch_devices.limit_threads()
    if context.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, context.cores)
    os.makedirs(session.basetemp, mode=0o700, exist_ok=True)
    return plugin


def _status(plugin: RankPlugin, code: int) -> int:
    """Return the exit status of a retired rank whose pytest session has ended with `code`."""
    passed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if code in passed:
        return RETIRED
    if plugin.exit_status in passed:  # A hook for the session's end has changed the status.
        return FAILED_BY_HOOK
    # Failed tests have been reported already.
    return RETIRED if code == pytest.ExitCode.TESTS_FAILED else int(code)


def _held(context: RankContext) -> str:
    """Return in JSON which devices this rank holds, for the sessions that its tests start."""
    directory, spec = context.session.directory, context.spec
    # The devices of kind cpu are parts of the cores to which this rank is confined.
    alone = spec.key.visible == "rank" or bool(context.cores)
    held = HeldDevices(
        rank=getpid(),
        server=os.getppid(),
        kind=spec.key.kind,
        devices=tuple(device.id for device in context.visible_devices),
        fractions={one.id: part for one in context.visible_devices if (part := context.fraction(one)) < 1},
        lock_folder=str(default_folder()),
        inner_lock_folder=inner_lock_folder(directory, spec.world, context.rank if alone else None),
    )
    return msgspec.json.encode(held).decode()


def _set_environment(context: RankContext, port: int | None) -> None:
    """Set the mask, the rank's identity, its number of threads and the mark's ``env``; record all in the context."""
    spec, rank = context.spec, context.rank
    context.inherited = dict(os.environ)
    changes: dict[str, str | None] = dict(context.session.hidden)
    changes[HELD] = _held(context) if context.visible_devices else None
    if context.visible_devices or spec.key.kind != "cpu":
        # The mask of CPU slots sets threads and cores. A rank must not use other ranks' cores, so name only its own.
        changes |= context.vendor.mask(context.own_devices if context.cores else context.visible_devices, os.environ)
    if spec.key.grouped:
        assert port is not None
        changes |= process_group.environment(spec, rank, port)
        if spec.ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            changes.setdefault("OMP_NUM_THREADS", "1")  # As torchrun: ranks must not overload the machine.
    changes |= worker_environment(context.session.worker_input_of(spec, rank))
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    context.variables = {**changes, **dict(spec.key.env)}
    for name, value in context.variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
