"""The program of an agent on a machine of a cluster, a child process of the actor there.

The agent reads the line of an `Invitation` from standard input, which is a pipe. It connects to the controller and
serves it until the connection ends or the other end of the pipe is closed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
from pathlib import Path

from pytest_accel.core import log, prctl
from pytest_accel.core.log import step
from pytest_accel.features.launchers.agent import serve_driver
from pytest_accel.features.launchers.machine_link import AgentLink
from pytest_accel.features.launchers.rendezvous import call
from pytest_accel.features.ray.agent_greeting import Invitation, NodeHello
from pytest_accel.features.ray.suite_code import suite_code
from pytest_accel.messages.struct_messages import decode

_JOIN_TIMEOUT = 60.0
"""Seconds in which the controller must be reached."""


def run(actor: int, raylet: int) -> None:
    """Run the agent in this process, a child of the process `actor`, whose parent is `raylet`, and exit."""
    prctl.die_with_parent(actor)
    # Ray has the kernel kill its workers first when memory runs out, and only a privileged user can undo that.
    with contextlib.suppress(PermissionError, FileNotFoundError):
        Path("/proc/self/oom_score_adj").write_text(
            Path(f"/proc/{raylet}/oom_score_adj").read_text(encoding="utf-8"), encoding="utf-8"
        )
    sys.exit(main())


def main() -> int:
    """Run the agent; return its exit status."""
    _restore_defaults()
    try:
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            invitation: Invitation = decode(stdin.readline(), Invitation)
        if invitation.log is not None:
            os.environ[log.VARIABLE] = invitation.log
            log.start_here(f"agent of machine {invitation.machine}")
        code = suite_code(invitation.rootdir)
        link = _join(invitation, NodeHello(invitation.machine, platform.node(), code, tuple(os.environ)))
    except (ValueError, ConnectionError) as error:
        step("ends: it %s", error)
        print(f"accel: the agent on {platform.node()} {error}", file=sys.stderr, flush=True)
        return 1
    return serve_driver(link, until=0)


def _restore_defaults() -> None:
    """Reset signal handlers, signal mask and priority, which the process that started this one may have changed."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError):  # Only root may raise the priority.
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _join(invitation: Invitation, hello: NodeHello) -> AgentLink:
    """Connect to the controller, and greet it; raise ConnectionError if it cannot be reached."""
    step("looks for the controller at %s, port %d", ", ".join(invitation.addresses), invitation.port)
    key = bytes.fromhex(invitation.key)
    try:
        return call(invitation.addresses, invitation.port, key, _JOIN_TIMEOUT, "the controller", lambda *_: hello)
    except ConnectionError as error:
        where = f"port {invitation.port} in {_JOIN_TIMEOUT:g} s"
        raise ConnectionError(f"did not reach the controller at {where}: {error}") from None
