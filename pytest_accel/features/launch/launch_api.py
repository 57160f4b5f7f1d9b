"""The value of the fixture `launch`: it makes a job of its arguments, and a result or an error of the job's end."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_accel.core import launcher_env, reserved_port
from pytest_accel.core.kinds import OWN_KINDS
from pytest_accel.core.role import loopback_interface
from pytest_accel.core.stash_keys import LAUNCHED_RANKS
from pytest_accel.core.units import parse_time
from pytest_accel.features.launch.launch_commands import LAUNCHERS, Job, missing
from pytest_accel.features.launch.launch_result import LaunchResult, error_of
from pytest_accel.features.launch.launched_process import run
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.hardware.vendors.cpu import affinity
from pytest_accel.rank.context import RANK
from pytest_accel.rank.device_memory import empty_cache
from pytest_accel.settings import options

_THREADS = "OMP_NUM_THREADS"


class Launch:
    """The fixture's value: call it to run a script."""

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> None:
        self._request = request
        self._folders = folders
        self._context = context = request.config.stash.get(RANK, None)
        self._devices = () if context is None else context.own_devices
        self._accelerated = context is not None and context.vendor.hardware and bool(self._devices)
        if context is not None and context.spec.grouped and (ranks := context.spec.ranks) > 1:
            pytest.fail(
                f"the fixture 'launch' starts ranks itself, and @pytest.mark.distributed({ranks}) would have {ranks} "
                "copies of the script launched: use @pytest.mark.devices(n) instead, and n ranks are launched",
                pytrace=False,
            )

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
        seconds = _check(launcher, nproc, timeout)
        masks = () if self._context is None else self._context.vendor.mask_variables
        for name in set(masks).intersection(env or ()):
            raise ValueError(f"launch(env={{{name!r}: ...}}): the lease sets the mask; request devices with marks")
        if (reason := missing(launcher)) is not None:
            if options.settings(self._request.config).strict:
                pytest.fail(f"{reason} (--accel-strict)", pytrace=False)
            pytest.skip(reason)
        count = nproc or (len(self._devices) if launcher != "python" else 0) or 1
        target = ("-m", os.fspath(script)) if module else (self._find(script),)
        folder, made = self._folders.mktemp("launch"), self._environment(count, env or {})
        with reserved_port.hold() as held:
            port, own_masks = held.getsockname()[1], {name: made[name] for name in masks if name in made}
            devices, of_script = self._devices, (*target, *map(str, args))
            job = Job(of_script, count, launcher_args, self._accelerated, devices, own_masks, made, str(folder), port)
            command, environ = LAUNCHERS[launcher].plan(job)
            if self._context is not None:
                empty_cache(self._context)
            self._request.node.user_properties.append((LAUNCHED_RANKS, count))
            status, in_time = run(command, environ, folder, seconds, prefixed=count > 1)
        result = LaunchResult.read(command, status, folder)
        error = error_of(launcher, result, None if in_time else seconds, output=output)
        if error is not None:
            raise error
        return result

    def _find(self, script: str | os.PathLike[str]) -> str:
        places = list(dict.fromkeys((self._request.path.parent / script, Path.cwd() / script)))
        for path in places:
            if path.is_file():
                return str(path.resolve())
        raise FileNotFoundError(f"launch({os.fspath(script)!r}): no such file: {' or '.join(map(str, places))}")

    def _environment(self, nproc: int, changes: Mapping[str, str | None]) -> dict[str, str]:
        """Return the environment of the script: the test's, without the variables that make its process a rank.

        Accelerators that are not leased are hidden, by the masks of all vendors but ``sim``. The cores are divided
        among the ranks, unless the user has set a number of threads. `changes` are the test's, and take precedence.
        """
        of_a_rank = {*launcher_env.of_a_rank(os.environ), "PYTEST_CURRENT_TEST"}
        of_a_rank |= {name for name in os.environ if name.startswith("PYTEST_XDIST_")}
        context = self._context
        own_threads = {} if context is None or _THREADS in dict(context.spec.key.env) else context.variables
        if os.environb.get(_THREADS.encode(), b"") == own_threads.get(_THREADS.encode()):
            of_a_rank.add(_THREADS)
        # A new interpreter would not have the entries of `sys.path` before the standard library.
        library = os.path.dirname(sysconfig.get_path("stdlib"))
        end = next((at for at, entry in enumerate(sys.path) if os.path.dirname(entry) == library), 0)
        added = [entry for entry in sys.path[:end] if entry and not entry.endswith(".zip")]
        made: dict[str, str | None] = {
            _THREADS: str(max(1, len(affinity()) // nproc)),
            "PYTHONUNBUFFERED": "1",  # A killed rank has written all its output.
            "PYTHONFAULTHANDLER": "1",  # A rank that dies of a signal shows its stack.
            "GLOO_SOCKET_IFNAME": loopback_interface(),  # Gloo would resolve the host's name, which may fail.
            **{name: value for name, value in os.environ.items() if name not in of_a_rank},
            "PYTHONPATH": os.pathsep.join(added),
        }
        for kind in () if self._accelerated else reversed(OWN_KINDS):  # ``rocm`` would remove the variable of ``cuda``.
            made |= {} if kind == "sim" else make_vendor(kind).mask((), os.environ)
        return {name: value for name, value in {**made, **changes}.items() if value is not None}


def _check(launcher: str, nproc: object, timeout: float | str | None) -> float | None:
    """Return the timeout in seconds; raise ValueError for an argument that is not allowed."""
    if launcher not in LAUNCHERS:
        raise ValueError(f"launch(launcher={launcher!r}): allowed are {', '.join(LAUNCHERS)}")
    most = 1 if launcher == "python" else sys.maxsize
    if nproc is not None and (isinstance(nproc, bool) or not isinstance(nproc, int) or not 1 <= nproc <= most):
        allowed = "1, since it starts one process," if launcher == "python" else "an int >= 1"
        raise ValueError(f"launch(launcher={launcher!r}, nproc={nproc!r}): allowed is {allowed} or None")
    with suppress(ValueError):
        if (seconds := None if timeout is None else parse_time(timeout)) != 0:
            return seconds
    form = "a time > 0 such as 300 (seconds), '90s', '5min' or '1.5h', or None"
    raise ValueError(f"launch(timeout={timeout!r}): allowed is {form}")
