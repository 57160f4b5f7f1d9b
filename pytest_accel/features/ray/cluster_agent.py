"""The program of an agent on a node of a cluster: ``python -m pytest_accel.features.ray.cluster_agent``.

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

from pytest_accel.core.clock import monotonic
from pytest_accel.core.handshakes import Refused, perform
from pytest_accel.features.launchers import greeting
from pytest_accel.features.launchers.agent import serve_driver
from pytest_accel.features.launchers.agent_admission import JOB, Invitation, read_invitation
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.greeting import AuthenticatedLink
from pytest_accel.features.launchers.suite_code import suite_code
from pytest_accel.features.launchers.tcp_transport import TcpAgentTransport

_JOIN_TIMEOUT = 60.0
"""Seconds in which the controller must be reached."""
_CALL_TIMEOUT = 3.0
"""Seconds that an attempt to connect may take."""
_GREETING_TIMEOUT = 10.0
"""Seconds that the greeting may take. Once the controller has admitted the agent, another attempt would fail."""
_RETRY_INTERVAL = 0.1
"""Seconds between two attempts."""


def main() -> int:
    """Run the agent; return its exit status."""
    _restore_defaults()
    try:
        invitation = read_invitation(_read_line(0))
        link, clock = _join(invitation)
    except (ValueError, ConnectionError) as error:
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
        invitation.node, os.getpid(), (), os.getcwd(), rootdir, {}, platform.node(), "", code, tuple(os.environ)
    )
    secret = bytes.fromhex(invitation.secret)
    deadline = monotonic() + _JOIN_TIMEOUT
    errors: dict[str, str] = {}
    while monotonic() < deadline:
        for address in invitation.addresses:
            try:
                link = socket.create_connection((address, invitation.port), _CALL_TIMEOUT)
            except OSError as error:
                errors[address] = str(error)
                continue
            try:
                greet = greeting.greet_listener(secret, JOB, hello)
                clock, peer, _ = perform(link, greet, monotonic() + _GREETING_TIMEOUT)
            except (Refused, EOFError, OSError, ValueError) as error:
                link.close()
                errors[address] = f"the process that listens there {error}" if str(error) else type(error).__name__
            else:
                return greeting.link_to(link, peer), clock
        time.sleep(_RETRY_INTERVAL)
    tried = "; ".join(f"{address}: {why}" for address, why in errors.items())
    raise ConnectionError(f"did not reach the controller at port {invitation.port} in {_JOIN_TIMEOUT:g} s: {tried}")


if __name__ == "__main__":
    sys.exit(main())
