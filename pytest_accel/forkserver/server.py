"""The process of the fork server, which serves the pool until the controller exits.

The fork server starts in two steps: it imports torch, pytest and its plugins, and then gets the session's settings
(:func:`main`). It has one thread and no device runtime, so that starting a rank costs only a fork. It is the subreaper
of all processes that its ranks start (prctl(2), PR_SET_CHILD_SUBREAPER). When the controller exits, for whatever
reason, the fork server kills all remaining processes. Server 0, and a server on another machine, then removes the
session's folder.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from os import _exit, execve, getpid
from typing import Any, NoReturn

from pytest_accel.core import log, processes, session_folder
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.log import step
from pytest_accel.core.plugin_roles import published_plugins
from pytest_accel.core.processes import kill_descendants
from pytest_accel.forkserver.forked_worlds import ForkedWorlds, send
from pytest_accel.forkserver.preload import (
    RANK_MODULES,
    TORCH_MODULES,
    blas_without_threads,
    import_installed,
    import_named,
    load_plugins,
    thread_count,
    unfit,
)
from pytest_accel.forkserver.server_messages import (
    FirstStep,
    Serve,
    ServerNotice,
    file_with,
    read_file,
)
from pytest_accel.messages import fd_passing
from pytest_accel.messages.unix_sockets import Connection


def main(connection: int, step_one: Sequence[Any], given: int | None = None) -> NoReturn:
    """Import what ranks need, then serve the session that this process is given, and exit.

    `step_one` is a :class:`FirstStep`. The socket on which the server serves, and an unnamed file with its
    :class:`Serve`, arrive on the socket `connection`. If the process has received them and then replaced itself, they
    are `connection` and `given`.
    """
    first, parent, path = FirstStep(*step_one), os.getppid(), tuple(sys.path)
    session_folder.claim(first.directory)
    log.start_here(f"fork server {first.server}")
    step("starts; its parent is process %d", parent)
    processes.become_subreaper()
    # The documentation of gc.freeze advises this for a process that forks. Importing torch also takes 1/7 less time.
    gc.disable()
    with blas_without_threads():
        problem = _import_ahead(first)
    if problem is not None:
        # A plugin that starts a thread must not keep a suite from running, and nobody has asked to import it here.
        step("starts again, without pytest's plugins: their import %s", problem)
        _start_anew(connection, first._replace(problem=problem), given, path)
    if given is None:
        passed = _receive(connection, parent)
        if passed is None:
            step("its parent has exited, or does not need it")
            _clean_up(first.own_folder)
            _exit(0)
        connection, given = passed
    begin = read_file(given, Serve)
    spec = begin.spec
    if begin.environment is not None:
        os.environ.update(begin.environment)
        for name in os.environ.keys() - begin.environment.keys():
            del os.environ[name]
        log.start_here(f"fork server {first.server}")
    if _has_other_modules([entry for entry in spec.sys_path if entry not in path]):
        step("starts again: the suite's folders have other modules than those that it has imported")
        with file_with(begin, first.directory) as file:
            _start_anew(connection, first, file.fileno(), spec.sys_path)
    sys.path[:] = spec.sys_path
    _serve(Connection(connection), begin, first, parent)


def _serve(connection: Connection, begin: Serve, first: FirstStep, parent: int) -> NoReturn:
    """Serve the session of `begin`, and exit."""
    if first.problem is not None:
        send(connection, ServerNotice(f"ranks load pytest's plugins themselves: their import {first.problem}"))
    # All ranks share this tracker, which removes the shared memory of killed ranks when the session ends.
    _start_resource_tracker(first.directory)
    error = None
    with blas_without_threads():
        if begin.spec.preload is not None:
            error = import_named(begin.spec.preload)
        if begin.spec.coverage is not None:
            import_installed(("coverage",))
    step("has imported what ranks need" if error is None else "cannot import what accel_preload names")
    pid = getpid()
    code = 1
    try:
        if error is not None:
            send(connection, ServerNotice(error=error))
        else:
            ForkedWorlds(connection, begin, launched=parent != begin.controller).serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if getpid() == pid:  # A forked child with an error also comes here.
            step("ends with status %d", code)
            if left := _clean_up(first.own_folder):
                send(connection, ServerNotice(survivors=left))
        _exit(code)  # Finalizing an interpreter with torch takes longer than the rest of the session's shutdown.


def _receive(connection: int, parent: int) -> list[int] | None:
    """Return the two descriptors that arrive on the socket `connection`; None if it is closed, or `parent` exits."""
    with Connection(connection) as waiting, contextlib.ExitStack() as stack:
        watched = [connection]
        if (end := processes.end_of(parent)) is not None:  # As in `ForkedWorlds`, EOF is not enough.
            stack.callback(os.close, end)
            watched.append(end)
        if connection in wait(watched):
            with contextlib.suppress(EOFError):
                return fd_passing.receive(waiting, 2)
    return None


def _import_ahead(first: FirstStep) -> str | None:
    """Import what all ranks need; return why they must not be forked after the import of pytest's plugins, or None."""
    import_installed(RANK_MODULES)
    published_plugins()  # Fills a cache for the ranks, which look up the plugins of installed packages.
    if first.plugin_options is None:
        return None
    import_installed(TORCH_MODULES)
    if first.problem is not None:
        return None
    known, threads = frozenset(sys.modules), thread_count()  # A debugger may have threads in this process.
    try:
        load_plugins(first.directory, first.plugin_options)
    except BaseException:
        traceback.print_exc()  # Not an error here: a rank that needs the plugin reports the same error itself.
    return unfit(known, threads)


def _has_other_modules(path: Sequence[str]) -> bool:
    """Return whether the folders `path` have modules that replace modules which this process has imported."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if "." not in name and spec is not None and spec.has_location:
            found = importlib.machinery.PathFinder.find_spec(name, path)
            if found is not None and found.origin != spec.origin:
                return True
    return False


def _start_anew(connection: int, first: FirstStep, given: int | None, path: Sequence[str]) -> NoReturn:
    """Replace this process by a fork server that has not imported anything yet; its `main` gets the arguments."""
    for descriptor in (connection, given):
        if descriptor is not None:
            os.set_inheritable(descriptor, True)
    source = f"from {__name__} import main; main({connection}, {tuple(first)!r}, {given})"
    command = python_command(source, path=path)
    execve(command[0], command, os.environ)


def _start_resource_tracker(directory: str) -> None:
    """Start multiprocessing's resource tracker in the folder `directory`, which only this user can write.

    The tracker has the flags of this process. Without -P, before Python 3.11, it imports modules from its folder.
    """
    before = os.getcwd()
    os.chdir(directory)
    try:
        resource_tracker.ensure_running()
    finally:
        os.chdir(before)


def _clean_up(folder: str | None) -> tuple[str, ...]:
    """Kill all descendants, and remove the session's `folder` if it is given; return the processes that live on."""
    left = kill_descendants()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return left
