"""The greeting of two processes that meet over TCP: authentication, the caller's identity, comparison of clocks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.features.launchers.agent_messages import ClockReading, Hello, Meeting
from pytest_accel.features.launchers.authentication import SealedFrames, admit_caller, prove_caller
from pytest_accel.features.launchers.handshakes import Handshake, Refused
from pytest_accel.messages.struct_messages import decode, encode

Greeting = TypeVar("Greeting", Hello, ClockReading, Meeting)
_ROUNDS = 5
"""Number of rounds in which the clocks are compared."""


@dataclass(frozen=True, slots=True)
class AuthenticatedLink:
    """A connection between two machines whose ends have greeted each other."""

    socket: socket.socket
    frames: SealedFrames
    """The frames after the greeting."""


@dataclass(frozen=True, slots=True)
class RemotePeer:
    """A process on another machine that has connected to this one."""

    hello: Hello
    link: AuthenticatedLink
    address: str
    """The address of its machine."""
    own_address: str
    """The address of this machine to which the process has connected."""


def remote_peer(call: socket.socket, hello: Hello, frames: SealedFrames) -> RemotePeer:
    """Return the process at the other end of `call`; raise OSError if it has disconnected."""
    addresses = plain(call.getpeername()[0]), plain(call.getsockname()[0])
    return RemotePeer(hello, AuthenticatedLink(call, frames), *addresses)


def greet_caller(
    secret: bytes, job: Sequence[str], ranks: Container[int], on_wrong_secret: Callable[[int], None]
) -> Handshake[tuple[Hello, SealedFrames]]:
    """Greet a caller, as the listener; return its greeting, and the frames of the connection."""
    peer = yield from admit_caller(secret, job, ranks, on_wrong_secret)
    frames = SealedFrames(peer, caller=False)
    hello = read((yield from frames.receive()), Hello)
    if hello.rank != peer.rank:
        raise Refused(f"claims to be rank {hello.rank}, but has authenticated as rank {peer.rank}")
    for _ in range(_ROUNDS):
        yield from frames.receive()
        yield frames.pack(encode(ClockReading(monotonic())))
    return hello, frames


def greet_listener(secret: bytes, job: Sequence[str], hello: Hello) -> Handshake[tuple[float, SealedFrames]]:
    """Greet the listener, as a caller; return the seconds to add to this clock to get the listener's.

    The second value is the frames of the connection.
    """
    peer = yield from prove_caller(secret, job, hello.rank)
    frames = SealedFrames(peer, caller=True)
    yield frames.pack(encode(hello))
    rounds = []
    for _ in range(_ROUNDS):
        began = monotonic()
        yield frames.pack(encode(ClockReading(began)))
        there = read((yield from frames.receive()), ClockReading)
        took = monotonic() - began
        # The listener read its clock between sending and receiving, so the shortest round gives the smallest error.
        rounds.append((took, there.seconds - began - took / 2))
    return min(rounds)[1], frames


def read(data: bytes, form: type[Greeting]) -> Greeting:
    """Return the message of a greeting in `data`; raise :class:`Refused` if it is malformed."""
    try:
        message: Greeting = decode(data, form)
    except ValueError as error:
        raise Refused(f"sent an invalid greeting: {error}") from None
    return message


def listen(port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on all addresses of this machine; port 0: any. Raise OSError if it is in use."""
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def own_addresses() -> list[str]:
    """Return the addresses at which other machines may reach this one."""
    return [address for _, address in own_interfaces()]


def own_interfaces() -> list[tuple[str, str]]:
    """Return :func:`own_addresses`, each after the name of its interface."""
    entries = [(name, one) for name, interface in psutil.net_if_addrs().items() for one in interface]
    found = [(name, one.address) for name, one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
    return [(name, at) for name, at in found if not at.startswith(("127.", "fe80:")) and at != "::1"]


def plain(address: str) -> str:
    """Return `address` without the prefix of IPv4 addresses on a dual-stack socket."""
    return address.removeprefix("::ffff:")
