"""The process of a rank: its fork from the server, a new interpreter if its test needs one, and its exit.

A rank whose mark's ``env`` has to be set before any module is imported gets a new interpreter, by which the forked
process replaces itself. So it is a child of the fork server and has its sockets, as all other ranks, but nothing that
the fork server has imported.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from gc import enable as enable_gc
from gc import freeze
from multiprocessing import process, resource_tracker, util
from os import _exit, environ, execve, fork, getpid, kill, set_inheritable, setsid
from signal import SIGKILL, set_wakeup_fd
from traceback import print_exc
from typing import NoReturn
from zlib import crc32

from pytest_accel.compat.torch_variables import is_read_later
from pytest_accel.core import processes
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.signals import ignore_rank_signals
from pytest_accel.forkserver.server_messages import file_with, read_file
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import Role, WorldSpec
from pytest_accel.rank.main import run


def fork_rank(session: SessionSpec, role: Role, *, leave_server: Callable[[], None], own_group: bool) -> int:
    """Fork a process, which becomes the rank with this `role`; return its pid.

    The child calls ``leave_server()`` to drop all that only the server uses. If `own_group` is False, the child stays
    in the server's process group.
    """
    # Imported modules live as long as the ranks. Freezing keeps the ranks' garbage collections from walking through
    # them and copying their pages (pytest alone collects five times when a session ends).
    freeze()
    server = getpid()
    pid = fork()
    if not pid:
        code = 1
        try:
            processes.die_with_parent(server)
            ignore_rank_signals()
            enable_gc()
            _disown_exit_functions()
            set_wakeup_fd(-1)
            leave_server()
            if own_group:
                setsid()
            variables = _variables(session, role.spec, role.rank)
            if not all(map(is_read_later, variables)):  # Modules that the server has imported may have read them.
                _start_interpreter(session, role, variables)
            code = run(session, role)
        except BaseException:
            print_exc()
        finally:  # Also if print_exc() raises: the child must not go on in the server's code.
            _leave(code)
    return pid


def _descriptors(role: Role) -> Iterator[int]:
    """Yield the descriptors of a rank."""
    yield from (role.listener, *role.locks)
    if role.store is not None:
        yield role.store


def _variables(session: SessionSpec, spec: WorldSpec, rank: int) -> dict[str, str]:
    """Return the environment variables that `rank` must have when its interpreter starts."""
    seed = session.hash_seed
    # A fork has the hash seed of its parent, so a rank with a hash seed of its own needs a new interpreter.
    varied = {} if seed is None or spec.ranks == 1 else {"PYTHONHASHSEED": str(crc32(f"{seed}/{rank}".encode()))}
    return {**varied, **dict(spec.key.env)}


def _start_interpreter(session: SessionSpec, role: Role, variables: Mapping[str, str]) -> NoReturn:
    """Replace this process, a fork of the fork server, by a new interpreter that becomes the rank with `role`."""
    tracker: int = resource_tracker.getfd()  # type: ignore[assignment]  # The fork server has started it.
    with file_with((session, role), session.directory) as file:
        for descriptor in (*_descriptors(role), tracker, file.fileno()):
            set_inheritable(descriptor, True)
        source = f"from {__name__} import main; main({file.fileno()}, {tracker})"
        command = python_command(source, path=session.sys_path)
        execve(command[0], command, {**environ, **variables})


def main(descriptor: int, tracker: int) -> NoReturn:
    """Become the rank whose session and role are in the file `descriptor`, in a new interpreter, and exit."""
    session, role = read_file(descriptor, tuple[SessionSpec, Role])
    # As in processes that multiprocessing spawns: a tracker of this rank's own would be killed together with the rank.
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    for one in (*_descriptors(role), tracker):
        set_inheritable(one, False)  # Programs that tests start must not keep these open.
    _kill_children_at_exit()
    code = 1
    try:
        code = run(session, role)
    except BaseException:
        print_exc()
    finally:
        _leave(code)


# The exit of a rank, after any test: the functions that are called then are bound when this module is imported.


def _disown_exit_functions() -> None:
    """Drop the exit functions inherited from the parent, which runs them itself. Later functions run at the exit.

    Call this in a child right after a fork.
    """
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Set when a process makes its first finalizer. Reset, so that the next finalizer registers the exit function again.
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    # The modules registered these when they were imported; this process needs them as well. They run in reverse order.
    # multiprocessing runs a finalizer only in the process that made it, and its own forks start without children too.
    atexit.register(logging.shutdown)
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]
    _kill_children_at_exit()


def _kill_children_at_exit() -> None:
    """Have children killed for which multiprocessing would wait forever when this process exits."""
    # Finalizers with a priority run before multiprocessing joins its children; the oldest of one priority runs last.
    util.Finalize(None, _kill_children, exitpriority=0)


def _kill_children() -> None:
    """Kill children for which multiprocessing would wait forever.

    The idle workers of an executor that nobody shut down are such children: only the exit functions of ``threading``,
    which :func:`_leave` does not run, would tell them to exit. `multiprocessing` terminates daemonic children itself.
    """
    for child in multiprocessing.active_children():
        if not child.daemon and child.pid is not None:
            with suppress(ProcessLookupError):
                kill(child.pid, SIGKILL)


def _leave(code: int) -> NoReturn:
    """Exit this process with `code` after its exit functions; leave the resources of its parent alone."""
    try:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
    finally:  # Exit whatever is raised: returning from here would run the parent's code in the child.
        _exit(code)
