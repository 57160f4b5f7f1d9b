"""The program of the agent of a node, a child process of the node's actor, which ends with it.

The actor itself cannot be the agent: Ray kills the children of a process with it, and the agent's child is the fork
server, which removes what is left if the agent is killed.
"""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import Container, Mapping

from pytest_accel.core import log, prctl
from pytest_accel.core.kinds import KINDS
from pytest_accel.core.launcher_env import of_a_rank
from pytest_accel.core.log import step
from pytest_accel.features.launchers.agent import serve_driver
from pytest_accel.features.launchers.machine_link import call
from pytest_accel.features.launchers.rendezvous import SECRET_VARIABLE
from pytest_accel.features.ray.ray_messages import Invitation, NodeHello
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
    """Run the agent in this process, a child of the process `actor`, and exit. Standard input has the `Invitation`."""
    prctl.die_with_parent(actor)
    sys.exit(serve(decode(sys.stdin.buffer.read(), Invitation)))


def serve(invitation: Invitation) -> int:
    """Join the session, and serve the controller until it exits; return the exit status."""
    # Ray's processes ignore SIGCHLD, which programs inherit: this process would not learn how its children end.
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    log.start_here(f"agent of machine {invitation.machine}")
    step("looks for the controller at %s, port %d", ", ".join(invitation.addresses), invitation.port)
    key, hello = bytes.fromhex(invitation.key), NodeHello(invitation.machine)
    try:
        link = call(invitation.addresses, invitation.port, key, lambda *_: hello, "the controller", _JOIN_TIMEOUT)
    except ConnectionError as error:
        step("ends: %s", error)
        where = f"at port {invitation.port} in {_JOIN_TIMEOUT:g} s"
        print(f"accel: the agent on {platform.node()} did not reach the controller {where}: {error}", file=sys.stderr)
        return 1
    return serve_driver(link)
