"""Ranks in an interpreter of their own, for tests whose ``env`` has to be set before any module is imported.

The fork server forks the rank's process, which then replaces itself by a new interpreter. So it is a child of the fork
server and has its sockets, as all other ranks, but nothing that the fork server has imported.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import tempfile
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import NoReturn

from msgspec import Struct

from pytest_accel.core.interpreter import python_command
from pytest_accel.core.metadata_cache import Installed
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.signals import STACK_SIGNAL
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.forkserver.fork_exit import kill_children_at_exit, leave
from pytest_accel.rank import flight_recorder
from pytest_accel.rank.process_group import StorePort
from pytest_accel.rank.role import Role


class _Inheritance(Struct, frozen=True):
    """The role of the rank, with the descriptors that the new interpreter inherits."""

    session: SessionSpec
    spec: WorldSpec
    rank: int
    listener: int
    port: int | None
    """Port of the world's store, or None if it has no store."""
    store: int | None
    """Descriptor of the store's socket, or None if this rank does not serve the store."""
    tracker: int | None
    """Descriptor of the pipe to the resource tracker of all ranks."""


def start_interpreter(session: SessionSpec, role: Role) -> NoReturn:
    """Replace this process, a fork of the fork server, by a new interpreter that becomes the rank with `role`."""
    # A new interpreter inherits that signals are ignored or blocked. Otherwise these would terminate it at first.
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    flight_recorder.prepare()
    held = None if role.store_port is None or role.rank else role.store_port.listening
    inheritance = _Inheritance(
        session,
        role.spec,
        role.rank,
        role.listener.fileno(),
        None if role.store_port is None else role.store_port.port,
        None if held is None else held.fileno(),
        resource_tracker.getfd(),
    )
    with tempfile.TemporaryFile(dir=session.directory) as file:
        file.write(pickle.dumps(inheritance))
        file.seek(0)
        for descriptor in (inheritance.listener, inheritance.store, inheritance.tracker, file.fileno()):
            if descriptor is not None:
                os.set_inheritable(descriptor, True)
        source = f"from {__name__} import main; main({file.fileno()})"
        command = python_command(source, path=session.sys_path)
        with suppress(OSError):  # The system limits the size of the environment of a new program.
            os.execve(command[0], command, {**os.environ, **dict(role.spec.key.env)})
        os.execve(command[0], command, os.environ)  # The rank sets `env` when it starts, in any case.


def main(descriptor: int) -> NoReturn:
    """Become the rank whose pickled role is in the file `descriptor`, and exit."""
    with open(descriptor, "rb") as file:
        inheritance: _Inheritance = pickle.load(file)
    # As in processes that multiprocessing spawns: a tracker of this rank's own would be killed together with the rank.
    resource_tracker._resource_tracker._fd = inheritance.tracker  # type: ignore[attr-defined]
    store = None if inheritance.store is None else socket.socket(fileno=inheritance.store)
    role = Role(
        inheritance.spec,
        inheritance.rank,
        socket.socket(fileno=inheritance.listener),
        None if inheritance.port is None else StorePort(inheritance.port, store),
    )
    for one in (inheritance.listener, inheritance.store, inheritance.tracker):
        if one is not None:
            os.set_inheritable(one, False)  # Programs that tests start must not keep the rank's sockets open.
    kill_children_at_exit()
    code = 1
    try:
        from pytest_accel.rank import main as rank_module

        code = rank_module.run(inheritance.session, lambda: role, Installed())
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        leave(code)
