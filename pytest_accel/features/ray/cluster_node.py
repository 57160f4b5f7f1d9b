"""A node of the cluster: the code and the environment with which it would run tests, and the program of its agent.

The agent is a child process of the node's actor, and ends with it. The actor itself cannot be the agent: Ray kills the
children of a process with it, and the agent's child is the fork server, which removes what is left if the agent is
killed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import sys
from collections.abc import Container, Mapping
from contextlib import suppress
from importlib import metadata

from pytest_accel.core import log, processes
from pytest_accel.core.kinds import KINDS
from pytest_accel.core.launcher_env import of_a_rank
from pytest_accel.core.log import step
from pytest_accel.features.launchers.agent import Agent
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.machine_link import call
from pytest_accel.features.launchers.rendezvous import SECRET_VARIABLE
from pytest_accel.features.ray.ray_messages import Invitation
from pytest_accel.messages.struct_messages import decode

_JOIN_TIMEOUT = 60.0
"""Seconds in which the controller must be reached."""
_OF_ONE_MACHINE = {"_", "DISPLAY", "HOSTNAME", "OLDPWD", "PWD", "SHLVL", "TEMP", "TMP", "TMPDIR", "VIRTUAL_ENV"}
_PREFIXES_OF_ONE_MACHINE = ("DBUS_", "KUBERNETES_", "RAY_", "SLURM_", "SSH_", "XDG_")
"""Names and prefixes of variables that describe a machine, or a process there."""


def additions(environ: Mapping[str, str], present: Container[str]) -> dict[str, str]:
    """Return the variables of the controller's `environ` for the ranks on a machine that sets those in `present`.

    If both set a variable, the machine's value is used, except for pytest's variables (``PYTEST_*``). Masks are left
    out, because they name the devices of one machine.
    """
    masks = {name for kind in KINDS.values() for name in kind.masks}
    left_out = {*_OF_ONE_MACHINE, *masks, *of_a_rank(environ), "PYTEST_CURRENT_TEST", SECRET_VARIABLE}
    return {
        name: value
        for name, value in environ.items()
        if (name not in present or name.startswith("PYTEST_"))
        and name not in left_out
        and not name.startswith(_PREFIXES_OF_ONE_MACHINE)
    }


def run(actor: int) -> None:
    """Join the session of the `Invitation` on standard input, serve its controller until that exits, and exit.

    This process is a child of the process `actor`.
    """
    processes.die_with_parent(actor)
    invitation = decode(sys.stdin.buffer.read(), Invitation)
    # Ray's processes ignore SIGCHLD, which programs inherit: this process would not learn how its children end.
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    log.start(f"agent of machine {invitation.machine}")
    step("looks for the controller at %s, port %d", ", ".join(invitation.addresses), invitation.port)
    key, hello = bytes.fromhex(invitation.key), Hello(invitation.machine, os.getpid(), host=platform.node())
    try:
        link = call(invitation.addresses, invitation.port, key, hello, "the controller", _JOIN_TIMEOUT)
    except ConnectionError as error:
        step("ends: %s", error)
        where = f"at port {invitation.port} in {_JOIN_TIMEOUT:g} s"
        sys.exit(f"accel: the agent on {platform.node()} did not reach the controller {where}: {error}")
    sys.exit(Agent(link).run())


_PACKAGES = ("pytest-accel", "pytest", "torch")
_NO_CODE = {"__pycache__", "node_modules", "site-packages"}
"""Names of folders without code of the suite."""
_NAMED = 3
"""Maximum number of packages and files that a message names."""


def suite_code(rootdir: str) -> dict[str, str]:
    """Return the code on this machine: versions by package, and digests of the Python files by path below `rootdir`.

    Hidden folders and installed packages do not count.
    """
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    for folder, folders, names in os.walk(rootdir):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NO_CODE]
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            with suppress(OSError), open(path, "rb") as file:  # The file may have been deleted, or be unreadable.
                found[os.path.relpath(path, rootdir)] = hashlib.sha256(file.read()).hexdigest()[:16]
    return found


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """Return how the code `there`, on another machine, differs from the code on this machine; None if it does not."""
    names = [name for name in here.keys() | there.keys() if here.get(name) != there.get(name)]
    if not names:
        return None
    if any(map(_is_file, here)) and not any(map(_is_file, there)):
        return "it has no Python files there; the suite must have the same path on all machines"
    texts = [
        name if _is_file(name) else f"{name} {there.get(name, 'is missing')} (here {here.get(name, 'missing')})"
        for name in sorted(names, key=lambda name: (_is_file(name), name))
    ]
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return f"it has other code: {', '.join(texts[:_NAMED])}{more}"


def _is_file(name: str) -> bool:
    return name.endswith(".py")
