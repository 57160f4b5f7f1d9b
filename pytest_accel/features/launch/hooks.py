"""Call of the kernel, and the value of the fixture `launch`: it makes a job of arguments, and a result of its end."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pytest_accel.core import launcher_env
from pytest_accel.core.interpreter import hold_port
from pytest_accel.core.kinds import KINDS
from pytest_accel.core.stash_keys import LAUNCHED_RANKS
from pytest_accel.core.units import parse_time
from pytest_accel.features.launch.launch_commands import LAUNCHERS, Job, missing, plan
from pytest_accel.features.launch.launched_script import LaunchError, LaunchResult, LaunchTimeout, describe_exits, run
from pytest_accel.hardware.kernel_files import affinity
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.messages.world_spec import loopback_interface
from pytest_accel.rank.context import RANK
from pytest_accel.rank.device_memory import empty_cache
from pytest_accel.settings import options

_THREADS = "OMP_NUM_THREADS"


def pytest_accel_make_launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return the value for the test of `request`; skip it if its parameter names a launcher that is absent."""
    return Launch(request, tmp_path_factory)


class Launch:
    """The fixture's value: call it to run a script."""

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> None:
        self._request, self._folders = request, folders
        self._context = context = request.config.stash.get(RANK, None)
        self._devices = () if context is None else context.own_devices
        self._accelerators = self._devices if context is not None and context.vendor.hardware else ()
        if context is not None and context.spec.key.grouped and (ranks := context.spec.ranks) > 1:
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
        launcher_args: Sequence[str] = (),
    ) -> LaunchResult:
        """Run `script` with `args` under `launcher`, wait for its end, and return the result.

        `script` is a path, or a module's name if `module` is True. A relative path is looked up in the test file's
        folder, then in the working directory. `nproc` is the number of processes, by default the number of the test's
        devices, or 1. `env` are environment variables for the processes; None removes a variable. After `timeout`, in
        seconds or as ``"5min"``, all processes are killed. `launcher_args` are extra flags for the launcher.

        Raise :class:`LaunchError` for an exit status other than 0, and :class:`LaunchTimeout` after the timeout. Raise
        ValueError for an argument that is not allowed. Skip the test if the launcher is not installed.
        """
        __tracebackhide__ = True
        if launcher not in LAUNCHERS:
            raise ValueError(f"launch(launcher={launcher!r}): allowed are {', '.join(LAUNCHERS)}")
        count = nproc if nproc is not None else (len(self._devices) if launcher != "python" else 0) or 1
        if count < 1 or (launcher == "python" and count > 1):
            raise ValueError(f"launch(launcher={launcher!r}, nproc={nproc}): python starts 1 process, launchers >= 1")
        seconds = math.inf if timeout is None else parse_time(timeout)
        masks = () if self._context is None else self._context.vendor.mask_variables
        for name in set(masks).intersection(env or ()):
            raise ValueError(f"launch(env={{{name!r}: ...}}): the lease sets the mask; request devices with marks")
        if (reason := missing(launcher)) is not None:
            if options.settings(self._request.config).strict:
                pytest.fail(f"{reason} (--accel-strict)", pytrace=False)
            pytest.skip(reason)
        beside = self._request.path.parent / script
        path = beside if beside.is_file() else Path(script).absolute()
        target = ("-m", os.fspath(script)) if module else (str(path),)
        folder, made = self._folders.mktemp("launch"), self._environment(count, env or {})
        with hold_port() as held:
            target, port = (*target, *map(str, args)), held.getsockname()[1]
            job = Job(target, count, launcher_args, self._accelerators, masks, made, str(folder), port)
            command, environ = plan(launcher, job)
            if self._context is not None:
                empty_cache(self._context)
            self._request.node.user_properties.append((LAUNCHED_RANKS, count))
            status, in_time = run(command, environ, folder, seconds)
        result = LaunchResult.read(command, status, folder)
        if not in_time:
            text = f"{launcher} did not end within {seconds:g} s (timeout={timeout!r}); all its processes were killed"
            raise LaunchTimeout(text, result)
        if status != 0:
            raise LaunchError(f"{launcher} ended {describe_exits(result)}", result)
        return result

    def _environment(self, nproc: int, changes: Mapping[str, str | None]) -> dict[str, str]:
        """Return the environment of the script: the test's, without the variables that make its process a rank.

        Accelerators that are not leased are hidden, by the masks of all vendors but ``sim``. The cores are divided
        among the ranks, unless the user has set a number of threads. `changes` are the test's, and take precedence.
        """
        of_a_rank = {*launcher_env.of_a_rank(os.environ), "PYTEST_CURRENT_TEST"}
        of_a_rank |= {name for name in os.environ if name.startswith("PYTEST_XDIST_")}
        context = self._context
        own_threads = {} if context is None or _THREADS in dict(context.spec.key.env) else context.variables
        if os.environ.get(_THREADS, "") == own_threads.get(_THREADS):
            of_a_rank.add(_THREADS)
        made: dict[str, str | None] = {
            _THREADS: str(max(1, len(affinity()) // nproc)),
            "PYTHONUNBUFFERED": "1",  # A killed rank has written all its output.
            "PYTHONFAULTHANDLER": "1",  # A rank that dies of a signal shows its stack.
            "GLOO_SOCKET_IFNAME": loopback_interface(),  # Gloo would resolve the host's name, which may fail.
            **{name: value for name, value in os.environ.items() if name not in of_a_rank},
            # A new interpreter adds the standard library and the entries after it by itself.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path[: sys.path.index(os.path.dirname(os.__file__))])),
        }
        for kind in reversed(() if self._accelerators else KINDS):  # ``rocm`` would remove a variable of ``cuda``.
            made |= {} if kind == "sim" else make_vendor(kind).mask((), os.environ)
        return {name: value for name, value in {**made, **changes}.items() if value is not None}
