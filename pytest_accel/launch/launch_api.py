"""What `launch` does when it is called: from its arguments to a job, and from the job to a result or an error."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pytest_accel.core.device import Device
from pytest_accel.core.programs import find_program
from pytest_accel.hardware.vendors.cpu import affinity
from pytest_accel.launch import reserved_port
from pytest_accel.launch.job import Job
from pytest_accel.launch.launch_environment import added_paths, hidden_accelerators, surroundings
from pytest_accel.launch.launch_result import LaunchError, LaunchResult, failed, silent, timed_out
from pytest_accel.launch.launched_process import Lost, Running
from pytest_accel.launch.launchers import AS_ROOT, LAUNCHERS, Launcher


@dataclass(frozen=True, slots=True)
class Lease:
    """What the test's process has, as far as a launch goes."""

    kind: str = "cpu"
    accelerated: bool = False
    devices: tuple[Device, ...] = ()
    mask_variables: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    """The variables that make it what it is."""


class Launch:
    """The fixture's value: call it to run a script."""

    def __init__(self, lease: Lease, folders: Callable[[], Path], beside: Path, skip: Callable[[str], None]) -> None:
        """`beside`: the folder of the test's file; `skip` ends the test for want of a launcher."""
        self._lease = lease
        self._folders = folders
        self._beside = beside
        self._skip = skip

    def __call__(
        self,
        script: str | os.PathLike[str],
        *args: object,
        launcher: str = "torchrun",
        nproc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        timeout: float | None = None,
        module: bool = False,
        output: bool = False,
        launcher_args: Sequence[str] = (),
    ) -> LaunchResult:
        """Run `script` (with `module`, a module's name) with `args` under `launcher`, and wait for its end.

        A relative path is one below the test file's folder, or else below the working directory. `nproc` is how many
        processes are started: as many as the test has devices, 1 where it has none. `env` are variables for them; None
        removes one. After `timeout` seconds all is ended. `output`: it is an error if no rank writes anything.
        `launcher_args` are more flags for the launcher.

        :class:`LaunchError` for a status other than 0, :class:`LaunchTimeout`, :class:`NoOutput`; ValueError for an
        argument that is not allowed; FileNotFoundError for a script that is not there. The test is skipped where the
        launcher is not installed.
        """
        __tracebackhide__ = True
        chosen = check(launcher, nproc, timeout)
        count = nproc or (len(self._lease.devices) if chosen.many else 0) or 1
        changes = dict(env or {})
        for name in self._lease.mask_variables:
            if name in changes:
                raise ValueError(f"launch(env={{{name!r}: ...}}): the mask is the lease's; ask for devices by marks")
        reason = missing(launcher)
        if reason is not None:
            self._skip(reason)
        folder = self._folders()
        base = surroundings(
            os.environ,
            own=self._lease.own,
            hidden={} if self._lease.accelerated else hidden_accelerators(os.environ),
            nproc=count,
            cores=len(affinity()),
            python_path=added_paths(sys.path),
            changes=changes,
        )
        with reserved_port.hold() as held:
            program = program_of(chosen)
            job = Job(
                launcher=launcher,
                script=os.fspath(script) if module else str(_find(script, self._beside)),
                args=tuple(map(str, args)),
                nproc=count,
                module=module,
                launcher_args=tuple(launcher_args),
                kind=self._lease.kind,
                accelerated=self._lease.accelerated,
                devices=self._lease.devices,
                mask_variables=self._lease.mask_variables,
                environ=base,
                python=sys.executable,
                folder=str(folder),
                port=held.getsockname()[1],
                program=program,
                version=version_of(program) if launcher == "mpirun" else "",
            )
            return run(job, chosen, timeout, output=output)


def run(job: Job, launcher: Launcher, timeout: float | None, *, output: bool) -> LaunchResult:
    """Run `job` to its end, showing what it writes; raises as `Launch` does."""
    __tracebackhide__ = True
    plan = launcher.plan(job)
    with Running(job, plan, _show) as running:
        try:
            status = running.wait(timeout)
            in_time = status is not None
            if status is None:
                status = running.end()
        except Lost as lost:
            raise LaunchError(f"{job.launcher}: {lost}", running.result(-signal.SIGKILL)) from None
        running.finish()
        result = running.result(status)
    if not in_time:
        assert timeout is not None
        raise timed_out(job.launcher, result, timeout, job.nproc)
    if status != 0:
        raise failed(job.launcher, result)
    if output and not any((*result.rank_stdout.values(), *result.rank_stderr.values())):
        raise silent(job.launcher, result)
    return result


def check(launcher: str, nproc: object, timeout: float | None) -> Launcher:
    """The launcher of that name; ValueError for an argument that is not allowed."""
    chosen = LAUNCHERS.get(launcher)
    if chosen is None:
        raise ValueError(f"launch(launcher={launcher!r}): allowed are {', '.join(LAUNCHERS)}")
    if nproc is not None and (isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1):
        raise ValueError(f"launch(nproc={nproc!r}): allowed is an int >= 1, or None")
    if isinstance(nproc, int) and nproc > 1 and not chosen.many:
        raise ValueError(f"launch(launcher={launcher!r}, nproc={nproc}): it starts one process; allowed is 1, or None")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"launch(timeout={timeout!r}): allowed is a number of seconds > 0, or None")
    return chosen


def missing(launcher: str) -> str | None:
    """Why `launcher`, one of `LAUNCHERS`, cannot be used here; None: it can."""
    wanted = LAUNCHERS[launcher]
    if wanted.package is not None and importlib.util.find_spec(wanted.package) is None:
        return f"launcher {launcher!r}: the package {wanted.package} is not installed"
    if wanted.programs and not program_of(wanted):
        return f"launcher {launcher!r}: there is no {' or '.join(wanted.programs)} beside Python or on PATH"
    return None


def program_of(launcher: Launcher) -> str:
    """The launcher's path; empty where it is none, or is not installed."""
    return next((found for name in launcher.programs if (found := find_program(name))), "")


@cache
def version_of(program: str) -> str:
    """What `program` says of itself."""
    return subprocess.run(
        [program, "--version"], env={**os.environ, **AS_ROOT}, capture_output=True, text=True, check=False
    ).stdout


def _find(script: str | os.PathLike[str], beside: Path) -> Path:
    places = list(dict.fromkeys((beside / script, Path.cwd() / script)))
    for path in places:
        if path.is_file():
            return path.resolve()
    raise FileNotFoundError(f"launch({os.fspath(script)!r}): there is no file {' nor '.join(map(str, places))}")


def _show(stream: str, text: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(text)
    target.flush()
