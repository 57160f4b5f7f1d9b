"""The program of an agent on a machine of a cluster, a child process of the actor there.

The agent reads the line of an `Invitation` from standard input, which is a pipe. It connects to the controller and
serves it until the connection ends or the other end of the pipe is closed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

from pytest_accel.core import log, prctl
from pytest_accel.core.clock import monotonic
from pytest_accel.core.log import step, step_once
from pytest_accel.features.launchers import greeting
from pytest_accel.features.launchers.agent import serve_driver
from pytest_accel.features.launchers.agent_messages import JOB, Hello, Invitation, read_invitation
from pytest_accel.features.launchers.greeting import AuthenticatedLink
from pytest_accel.features.launchers.handshakes import Refused, perform
from pytest_accel.features.launchers.suite_code import suite_code
from pytest_accel.features.launchers.transports import TcpAgentTransport

_JOIN_TIMEOUT = 60.0
"""Seconds in which the controller must be reached."""
_CALL_TIMEOUT = 3.0
"""Seconds that an attempt to connect may take."""
_GREETING_TIMEOUT = 10.0
"""Seconds that the greeting may take. Once the controller has admitted the agent, another attempt would fail."""
_RETRY_INTERVAL = 0.1
"""Seconds between two attempts."""


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
        invitation = read_invitation(_read_line(0))
        if invitation.log is not None:
            os.environ[log.VARIABLE] = invitation.log
            log.start_here(f"agent of machine {invitation.machine}")
        link, clock = _join(invitation)
    except (ValueError, ConnectionError) as error:
        step("ends: it %s", error)
        print(f"accel: the agent on {platform.node()} {error}", file=sys.stderr, flush=True)
        return 1
    transport = TcpAgentTransport(link, clock)
    transport.watch(os.dup(0), partial(transport.expect_exit, 0, 0.0))
    return serve_driver(transport)


def _restore_defaults() -> None:
    """Reset signal handlers, signal mask and priority, which the process that started this one may have changed."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError):  # Only root may raise the priority.
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line


def _join(invitation: Invitation) -> tuple[AuthenticatedLink, float]:
    """Connect to the controller; return the connection, and the seconds by which the controller's clock is ahead.

    Raise ConnectionError if the controller cannot be reached.
    """
    code, rootdir = suite_code(invitation.rootdir), invitation.rootdir
    hello = Hello(
        invitation.machine, os.getpid(), (), os.getcwd(), rootdir, {}, platform.node(), "", code, tuple(os.environ)
    )
    secret = bytes.fromhex(invitation.secret)
    deadline = monotonic() + _JOIN_TIMEOUT
    errors: dict[str, str] = {}
    seen: set[str] = set()
    step("looks for the controller at %s, port %d", ", ".join(invitation.addresses), invitation.port)
    while monotonic() < deadline:
        for address in invitation.addresses:
            try:
                link = socket.create_connection((address, invitation.port), _CALL_TIMEOUT)
            except OSError as error:
                errors[address] = str(error)
                step_once(seen, "cannot connect to the controller at %s: %s", address, errors[address])
                continue
            try:
                greet = greeting.greet_listener(secret, JOB, hello)
                clock, frames = perform(link, greet, monotonic() + _GREETING_TIMEOUT)
            except (Refused, EOFError, OSError, ValueError) as error:
                link.close()
                errors[address] = f"the process that listens there {error}" if str(error) else type(error).__name__
                step_once(seen, "cannot join the controller at %s: %s", address, errors[address])
            else:
                step("is connected to the controller at %s", address)
                return AuthenticatedLink(link, frames), clock
        time.sleep(_RETRY_INTERVAL)
    tried = "; ".join(f"{address}: {why}" for address, why in errors.items())
    raise ConnectionError(f"did not reach the controller at port {invitation.port} in {_JOIN_TIMEOUT:g} s: {tried}")
