"""Spawned processes of tests, forked from a process that has imported torch: ``accel_adopt = spawn``.

A new interpreter that imports torch takes seconds, a fork milliseconds. While a test runs, processes of
multiprocessing's start method ``spawn`` are started here. Only their start is replaced: the standard library and torch
still pickle their function, join them and report their end. So a function runs as in a new interpreter, whether
`torch.multiprocessing.spawn`, a list of processes, a pool or a manager has started it.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from multiprocessing import context, forkserver, popen_forkserver, reduction, spawn
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize, _run_finalizers, close_fds  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from pytest_accel.compat.torch_variables import READ_AT_IMPORT
from pytest_accel.core.clock import GRACE
from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.interpreter import unmeasured
from pytest_accel.core.processes import kill_tree
from pytest_accel.core.signals import STACK_SIGNAL
from pytest_accel.core.stash_keys import MARKED
from pytest_accel.core.terminal_lines import warn
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.python_stacks import take_stacks
from pytest_accel.features.adoption import spawn_server
from pytest_accel.features.adoption.suite_adoption import may_adopt
from pytest_accel.forkserver.preload import TORCH_MODULES, used_runtime
from pytest_accel.messages.world_spec import LOOPBACK, WorldSpec
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession

_BOTTOM = re.compile(r'^ *File ".*multiprocessing.process\.py", line \d+ in run$', re.MULTILINE)
"""The frame by which multiprocessing calls the function of a process."""


class Spawning:
    """Pytest plugin that starts spawned processes of tests in this process, and leases the devices of torch's ranks."""

    def __init__(self, config: pytest.Config, session: AccelSession | None) -> None:
        """`session` is None in a rank. There the test has its devices and time limit."""
        self._session: Any = session
        self._settings = options.settings(config) if session is None else session.settings
        self._pid = os.getpid()
        self._servers: dict[object, _Server] = {}
        """The servers, by the settings that a new interpreter reads before it gets data from its parent."""
        self._running: list[_Popen] = []
        self._lease: WorldSpec | None = None
        self._users: list[BaseProcess] = []
        """The processes that may use the lease after the end of the call that has started them."""
        self._others: Counter[str] = Counter()
        """Numbers of processes that multiprocessing itself has started, by reason."""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        with self._phase(item):
            return (yield)

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    def pytest_unconfigure(self) -> None:
        if os.getpid() == self._pid and self._servers:
            # Pools end first (this priority is theirs): an idle worker that is killed keeps a lock that this needs.
            _run_finalizers(15)
            for server in self._servers.values():
                server.stop()

    @contextmanager
    def _phase(self, item: pytest.Item) -> Iterator[None]:
        """Start the processes of a phase of `item`, and limit its time from the first of them on."""
        __tracebackhide__ = True
        if not may_adopt(item) or MARKED in item.stash or os.getpid() != self._pid:
            yield
            return
        limit = _TimeLimit(self._settings.timeout, self._running)
        try:
            with ExitStack() as stack:
                for owner, name, function in self._functions(item, limit):
                    stack.enter_context(mock.patch.object(owner, name, function))
                stack.callback(limit.end)
                yield
        except KeyboardInterrupt:
            if limit.report is None:
                raise
            raise pytest.fail.Exception(limit.report, pytrace=False) from None
        finally:
            if os.getpid() == self._pid:
                self._running[:] = filter(_is_running, self._running)
                self._give_back()
                for reason, number in self._others.items():
                    warn(f"accel_adopt: processes that were not forked: {number} ({reason})")
                self._others.clear()

    def _functions(self, item: pytest.Item, limit: _TimeLimit) -> Iterator[tuple[Any, str, Any]]:
        """Yield functions that start processes while `item` runs, each with its owner and its name there."""
        yield context.SpawnProcess, "_Popen", staticmethod(partial(self._start, context.SpawnProcess._Popen, limit))
        module: Any = sys.modules.get("torch.multiprocessing.spawn")  # The attribute of this name is a function.
        if self._session is not None and module is not None:
            function = update_wrapper(partial(self._spawn, module.start_processes, item), module.start_processes)
            yield module, "start_processes", function
            yield sys.modules["torch.multiprocessing"], "start_processes", function

    def _start(self, original: Callable[[BaseProcess], Any], limit: _TimeLimit, process: BaseProcess) -> Any:
        """Start `process`, and return its `Popen`; leave that to `original` if it cannot be forked."""
        if os.getpid() != self._pid:
            return original(process)
        try:
            popen = _Popen(process, self._server())
        except (EOFError, OSError, ValueError) as error:
            # "too many fds": the arguments have hundreds of shared tensors. The other errors are those of a server that
            # has ended, as it does if it must not be forked.
            ended = "no process to fork them from; see what the test wrote (-rP)"
            self._others[str(error) if isinstance(error, ValueError) else ended] += 1
            return original(process)
        self._running.append(popen)
        if self._session is not None:
            limit.begin()
        return popen

    def _server(self) -> _Server:
        early = {name: value for name, value in os.environ.items() if name in READ_AT_IMPORT or name[:6] == "PYTHON"}
        preload, has_torch = self._settings.preload, "torch" in sys.modules
        modules = () if preload == "none" else (*preload, *(TORCH_MODULES if has_torch else ()))
        return self._servers.setdefault((has_torch, spawn.get_executable(), *sorted(early.items())), _Server(modules))

    def _spawn(self, original: Any, item: Any, fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **kw: Any) -> Any:
        """Call torch's function with the variables of torchrun and a mask of `nprocs` leased devices, all if fewer."""
        __tracebackhide__ = True
        machine, kind = self._session.machine, self._session.machine.session_kind
        with socket.create_server((LOOPBACK, 0)) as free:
            port = str(free.getsockname()[1])
        size, own = str(nprocs), {"RANK": "0", "LOCAL_RANK": "0"}
        given: dict[str, Any] = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "WORLD_SIZE": size, **own}
        # A test may set some and need the others to be missing: Accelerate takes LOCAL_RANK for a distributed run.
        are_ours = os.environ.keys().isdisjoint(given)
        given = {**(given if are_ours else {}), **os.environ}
        # Processes may share tensors of a runtime that is in use, which name its devices by the mask of this process.
        if kind not in (None, "none", "cpu") and not machine.is_cluster and used_runtime() is None:
            # A second lease beside the first could make two tests wait for each other.
            if self._lease is None and (needed := min(nprocs, len(machine.session.devices))):
                key = WorldKey(kind, DeviceNeed(needed, kind=kind), 0, grouped=False)
                self._lease = self._session.lease(key, item.nodeid)
            given |= {} if self._lease is None else machine.vendor(kind).mask(self._lease.devices, os.environ)
        given = {name: value for name, value in given.items() if value is not None}
        ranks, start = iter(range(nprocs)), BaseProcess.start

        def begin(process: BaseProcess) -> None:
            os.environ.update(dict.fromkeys(own if are_ours else (), str(next(ranks))))
            start(process)

        try:
            with mock.patch.dict(os.environ, given, clear=True), mock.patch.object(BaseProcess, "start", begin):
                started = original(fn, args, nprocs, *more, **kw)
                self._users += () if self._lease is None else getattr(started, "processes", ())
                return started
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Give back the lease if no process uses it any more."""
        self._users[:] = [process for process in self._users if process.is_alive()]
        if self._lease is not None and not self._users:
            lease, self._lease = self._lease, None
            self._session.end_lease(lease)


class _Server(forkserver.ForkServer):
    """A fork server of the standard library, with the modules that processes need."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        super().__init__()
        self._settings = json.dumps([sys.path, modules])
        self.set_forkserver_preload([spawn_server.__name__])

    def ensure_running(self) -> None:
        """Start the server if it does not run. Coverage measures the processes, and not the server."""
        environment = {**unmeasured(os.environ), spawn_server.SETTINGS: self._settings}
        with mock.patch.dict(os.environ, environment, clear=True):
            super().ensure_running()

    def stop(self) -> None:
        """Kill all processes that the server has forked, and wait for its end."""
        self._stop()  # type: ignore[attr-defined]


class _Popen(popen_forkserver.Popen):
    """A process forked by `server`. Differs from the base class in the server, and in what is pickled."""

    def __init__(self, process: BaseProcess, server: _Server) -> None:
        self._server = server
        self.name = process.name
        self._fds: list[int]
        self.stacks, path = tempfile.mkstemp()
        os.unlink(path)
        super().__init__(process)

    def _launch(self, process_obj: BaseProcess) -> None:
        data = spawn.get_preparation_data(process_obj.name)
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn_server.Beginning(data, self.stacks), buffer)
            reduction.dump(spawn_server.SpawnedProcess(process_obj), buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, write = self._server.connect_to_new_process(self._fds)
        # The process learns by this descriptor that its parent has exited.
        self.finalizer = Finalize(self, close_fds, (os.dup(write), self.sentinel, self.stacks))
        with open(write, "wb") as file:
            file.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _TimeLimit(threading.Timer):
    """The time limit of one phase, which begins with the first process. Interrupts the main thread once."""

    def __init__(self, seconds: float, running: list[_Popen]) -> None:
        super().__init__(seconds, self._interrupt)
        self.daemon, self._running = True, running
        self.report: str | None = None
        """The stacks of all processes, once the phase has timed out."""

    def begin(self) -> None:
        """Start the limit, if it has not been started."""
        if self.ident is None and threading.current_thread() is threading.main_thread():
            self.start()

    def end(self) -> None:
        """End the limit. Raise KeyboardInterrupt if the time was over: this thread gets it before `join` returns."""
        if self.ident is not None:
            self.cancel()
            self.join()

    def _interrupt(self) -> None:
        running = dict(enumerate(filter(_is_running, self._running)))
        paths = {number: f"/dev/fd/{popen.stacks}" for number, popen in running.items()}
        stacks = take_stacks({number: popen.pid for number, popen in running.items()}, paths, STACK_SIGNAL)
        lines = [f"timed out after {self.interval:g} s (--accel-timeout); its spawned processes were killed"]
        for number, popen in running.items():
            stack = _BOTTOM.split(stacks.get(number, "no answer"))[0].rstrip()
            lines += [f"--- stack of {popen.name}, process {popen.pid} ---", stack]
        self.report = "\n".join(lines)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.finished.wait(GRACE)  # `end` sets it when the test has left its pools: see `pytest_unconfigure`.
        for popen in running.values():
            kill_tree(popen.pid)


def _is_running(popen: _Popen) -> bool:
    """Return whether the process runs. Any thread may call this: it reads nothing that a join waits for."""
    return popen.returncode is None and not wait([popen.sentinel], 0)
