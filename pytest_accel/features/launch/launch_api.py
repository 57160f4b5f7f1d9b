"""The call of the fixture `launch`: from its arguments to a job, and from the job to a result or an error.

The environment of the script is the test's own, without the variables that make the test's process a rank.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pytest_accel.core import launcher_env, reserved_port
from pytest_accel.core.device import Device
from pytest_accel.core.interpreter import find_program
from pytest_accel.core.kinds import OWN_KINDS
from pytest_accel.core.role import loopback_interface
from pytest_accel.core.units import parse_time
from pytest_accel.features.launch.launch_commands import AS_ROOT, LAUNCHERS, Job, Launcher
from pytest_accel.features.launch.launch_result import LaunchError, LaunchResult, failed, no_output, timed_out
from pytest_accel.features.launch.launched_process import LaunchedProcess, ReaperDied
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.hardware.vendors.cpu import affinity

_VERSION_TIMEOUT = 30.0
"""Seconds that a launcher may take to print its version."""


@dataclass(frozen=True, slots=True)
class LeasedDevices:
    """The devices and mask of the test's process, as far as a launch needs them."""

    kind: str = "cpu"
    accelerated: bool = False
    devices: tuple[Device, ...] = ()
    mask_variables: tuple[str, ...] = ()
    own: Mapping[str, str | None] = field(default_factory=dict)
    """The environment variables that were set for the test's process, such as masks and its rank; None: unset."""


class Launch:
    """The fixture's value: call it to run a script."""

    def __init__(
        self,
        leased: LeasedDevices,
        make_folder: Callable[[], Path],
        test_folder: Path,
        skip: Callable[[str], None],
        free_devices: Callable[[], None],
        record_ranks: Callable[[int], None],
    ) -> None:
        """Make the value for a test.

        `test_folder` is the folder of the test file, `skip` skips the test with a reason, `free_devices` frees the
        memory of the devices that the test's process does not need, and `record_ranks` records the number of ranks of
        a call.
        """
        self._leased = leased
        self._make_folder = make_folder
        self._test_folder = test_folder
        self._skip = skip
        self._free_devices = free_devices
        self._record_ranks = record_ranks

    def __call__(
        self,
        script: str | os.PathLike[str],
        *args: object,
        launcher: str = "torchrun",
        nproc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        timeout: float | str | None = None,
        module: bool = False,
        output: bool = False,
        launcher_args: Sequence[str] = (),
    ) -> LaunchResult:
        """Run `script` with `args` under `launcher`, wait for its end, and return the result.

        `script` is a path, or a module's name if `module` is True. A relative path is looked up in the test file's
        folder, then in the working directory. `nproc` is the number of processes; by default one for each device of the
        test, or 1 if it has none. `env` are environment variables for the processes; None removes one. After `timeout`,
        in seconds or as ``"5min"``, all processes are killed. `launcher_args` are extra flags for the launcher.

        Raise :class:`LaunchError` for an exit status other than 0, :class:`LaunchTimeout` after the timeout, and
        :class:`NoOutput` if `output` is True and no rank wrote anything. Raise ValueError for an argument that is not
        allowed, and FileNotFoundError if the script does not exist. Skip the test if the launcher is not installed.
        """
        __tracebackhide__ = True
        chosen, seconds = check(launcher, nproc, timeout)
        count = nproc or (len(self._leased.devices) if chosen.many else 0) or 1
        changes = dict(env or {})
        for name in self._leased.mask_variables:
            if name in changes:
                raise ValueError(f"launch(env={{{name!r}: ...}}): the lease sets the mask; request devices with marks")
        reason = missing(launcher)
        if reason is not None:
            self._skip(reason)
        folder = self._make_folder()
        base = launch_environment(
            os.environ,
            own=self._leased.own,
            hidden={} if self._leased.accelerated else hidden_accelerators(os.environ),
            nproc=count,
            cores=len(affinity()),
            python_path=added_paths(sys.path),
            changes=changes,
        )
        with reserved_port.hold() as held:
            program = program_of(chosen)
            job = Job(
                launcher=launcher,
                script=os.fspath(script) if module else str(_find(script, self._test_folder)),
                args=tuple(map(str, args)),
                nproc=count,
                module=module,
                launcher_args=tuple(launcher_args),
                kind=self._leased.kind,
                accelerated=self._leased.accelerated,
                devices=self._leased.devices,
                mask_variables=self._leased.mask_variables,
                environ=base,
                python=sys.executable,
                folder=str(folder),
                port=held.getsockname()[1],
                program=program,
                version=version_of(program) if launcher == "mpirun" else "",
            )
            self._free_devices()
            self._record_ranks(count)
            return run(job, chosen, seconds, output=output)


def run(job: Job, launcher: Launcher, timeout: float | None, *, output: bool) -> LaunchResult:
    """Run `job` to its end, show its output, and return the result; raise the errors of :meth:`Launch.__call__`."""
    __tracebackhide__ = True
    plan = launcher.plan(job)
    with LaunchedProcess(job, plan, _show) as process:
        try:
            status = process.wait(timeout)
            in_time = status is not None
            if status is None:
                status = process.terminate()
        except ReaperDied as error:
            raise LaunchError(f"{job.launcher}: {error}", process.result(-signal.SIGKILL)) from None
        process.finish()
        result = process.result(status)
    if not in_time:
        assert timeout is not None
        raise timed_out(job.launcher, result, timeout, job.nproc)
    if status != 0:
        raise failed(job.launcher, result)
    if output and not any((*result.rank_stdout.values(), *result.rank_stderr.values())):
        raise no_output(job.launcher, result)
    return result


def check(launcher: str, nproc: object, timeout: float | str | None) -> tuple[Launcher, float | None]:
    """Return the launcher of that name, and the timeout in seconds; raise ValueError for what is not allowed."""
    chosen = LAUNCHERS.get(launcher)
    if chosen is None:
        raise ValueError(f"launch(launcher={launcher!r}): allowed are {', '.join(LAUNCHERS)}")
    if nproc is not None and (isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1):
        raise ValueError(f"launch(nproc={nproc!r}): allowed is an int >= 1, or None")
    if isinstance(nproc, int) and nproc > 1 and not chosen.many:
        raise ValueError(f"launch(launcher={launcher!r}, nproc={nproc}): it starts one process; allowed is 1, or None")
    try:
        seconds = None if timeout is None else parse_time(timeout)
    except ValueError:
        seconds = 0
    if seconds == 0:
        raise ValueError(
            f"launch(timeout={timeout!r}): allowed is a time > 0 such as 300 (seconds), '90s', '5min' or '1.5h', "
            "or None"
        )
    return chosen, seconds


def missing(launcher: str) -> str | None:
    """Return why `launcher`, one of `LAUNCHERS`, cannot be used here; None if it can."""
    wanted = LAUNCHERS[launcher]
    if wanted.package is not None and importlib.util.find_spec(wanted.package) is None:
        return f"launcher {launcher!r}: the package {wanted.package} is not installed"
    if wanted.programs and not program_of(wanted):
        return f"launcher {launcher!r}: there is no {' or '.join(wanted.programs)} beside Python or on PATH"
    return None


def program_of(launcher: Launcher) -> str:
    """Return the path of the launcher's program; empty if it has none, or if none is installed."""
    return next((found for name in launcher.programs if (found := find_program(name))), "")


@cache
def version_of(program: str) -> str:
    """Return the output of `program` with ``--version``; raise TimeoutError if it does not end."""
    command = [program, "--version"]
    try:
        return subprocess.run(
            command,
            env={**os.environ, **AS_ROOT},
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=_VERSION_TIMEOUT,
        ).stdout
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{shlex.join(command)} did not end within {_VERSION_TIMEOUT:g} s") from None


def _find(script: str | os.PathLike[str], test_folder: Path) -> Path:
    places = list(dict.fromkeys((test_folder / script, Path.cwd() / script)))
    for path in places:
        if path.is_file():
            return path.resolve()
    raise FileNotFoundError(f"launch({os.fspath(script)!r}): no such file: {' or '.join(map(str, places))}")


def _show(stream: str, text: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(text)
    target.flush()


_THREADS = "OMP_NUM_THREADS"


def launch_environment(
    environ: Mapping[str, str],
    *,
    own: Mapping[str, str | None],
    hidden: Mapping[str, str | None],
    nproc: int,
    cores: int,
    python_path: Sequence[str],
    changes: Mapping[str, str | None],
) -> dict[str, str]:
    """Return the environment for the launched processes, made from `environ`.

    `own` are the variables that the plugin has set for the test's process: of these, masks are kept, and
    `OMP_NUM_THREADS` is dropped unless the test has set another value. `hidden` are masks that hide devices which are
    not leased. The number of threads of each rank is `cores` divided by `nproc`, unless the user has set one. `changes`
    are the test's, and take precedence; None removes a variable.
    """
    of_a_rank = {*launcher_env.of_a_rank(environ), "PYTEST_CURRENT_TEST"}
    made = {
        name: value for name, value in environ.items() if name not in of_a_rank and not name.startswith("PYTEST_XDIST_")
    }
    if made.get(_THREADS) == own.get(_THREADS):
        made.pop(_THREADS, None)
    made.setdefault(_THREADS, str(max(1, cores // nproc)))
    if python_path:
        made["PYTHONPATH"] = os.pathsep.join(python_path)
    # Unbuffered: a killed rank has written all its output. Fault handler: a rank that dies of a signal shows its stack.
    made.setdefault("PYTHONUNBUFFERED", "1")
    made.setdefault("PYTHONFAULTHANDLER", "1")
    # Otherwise Gloo resolves the host's name, which fails on some machines.
    made.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    for name, value in (*hidden.items(), *changes.items()):
        if value is None:
            made.pop(name, None)
        else:
            made[name] = value
    return made


def hidden_accelerators(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the masks that hide all devices of all vendors but ``sim``; kinds without a mask cannot be hidden."""
    found: dict[str, str | None] = {}
    for kind in reversed(OWN_KINDS):  # ``cuda`` comes last, since ``rocm`` would remove its variable.
        if kind != "sim":
            found |= make_vendor(kind).mask((), environ)
    return found


def added_paths(search: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of a ``sys.path`` before the standard library, which a new interpreter would not have."""
    library = sysconfig.get_path("stdlib")
    end = next((at for at, entry in enumerate(search) if os.path.dirname(entry) == os.path.dirname(library)), 0)
    return tuple(entry for entry in search[:end] if entry and not entry.endswith(".zip"))
