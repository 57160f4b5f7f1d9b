"""The greeting of two processes that meet over TCP: authentication, the caller's identity, comparison of clocks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.core.handshakes import Handshake, Refused
from pytest_accel.features.launchers import mutual_auth
from pytest_accel.features.launchers.agent_messages import Hello, hello_of
from pytest_accel.features.launchers.mutual_auth import Messages, Peer

_ROUNDS = 5
"""Number of rounds in which the clocks are compared."""


@dataclass(frozen=True, slots=True)
class AuthenticatedLink:
    """A connection between two nodes whose ends have authenticated each other."""

    socket: socket.socket
    key: bytes
    """The key for the authentication codes of frames."""


@dataclass(frozen=True, slots=True)
class RemotePeer:
    """A process on another node that has connected to this one."""

    hello: Hello
    link: AuthenticatedLink
    address: str
    """The address of its node."""
    own_address: str
    """The address of this node to which the process has connected."""


def remote_peer(call: socket.socket, hello: Hello, peer: Peer) -> RemotePeer:
    """Return the process at the other end of `call`; raise OSError if it has disconnected."""
    addresses = plain(call.getpeername()[0]), plain(call.getsockname()[0])
    return RemotePeer(hello, link_to(call, peer), *addresses)


def link_to(call: socket.socket, peer: Peer) -> AuthenticatedLink:
    """Return `call`, the connection to `peer`, with the key that a multiplexer needs."""
    return AuthenticatedLink(call, mutual_auth.key_for(peer, "frames"))


def greet_caller(
    secret: bytes, job: Sequence[str], ranks: Container[int], on_wrong_secret: Callable[[int], None]
) -> Handshake[tuple[Hello, Peer, Messages]]:
    """Greet a caller, as the listener; return its greeting and identity, and the channel for further messages."""
    peer = yield from mutual_auth.admit_caller(secret, job, ranks, on_wrong_secret)
    messages = Messages(peer, caller=False)
    hello = hello_of((yield from messages.receive()))
    if hello.rank != peer.rank:
        raise Refused(f"claims to be rank {hello.rank}, but has authenticated as rank {peer.rank}")
    for _ in range(_ROUNDS):
        yield from messages.receive()
        yield messages.pack(monotonic())
    return hello, peer, messages


def greet_listener(secret: bytes, job: Sequence[str], hello: Hello) -> Handshake[tuple[float, Peer, Messages]]:
    """Greet the listener, as a caller; return the seconds to add to this clock to get the listener's, and its identity.

    The last value is the channel for further messages.
    """
    peer = yield from mutual_auth.prove_caller(secret, job, hello.rank)
    messages = Messages(peer, caller=True)
    yield messages.pack(hello.as_json())
    rounds = []
    for _ in range(_ROUNDS):
        began = monotonic()
        yield messages.pack(None)
        there = yield from messages.receive()
        took = monotonic() - began
        if not isinstance(there, float):
            raise Refused(f"sent an invalid time: {there!r}")
        # The listener read its clock between sending and receiving, so the shortest round gives the smallest error.
        rounds.append((took, there - began - took / 2))
    return min(rounds)[1], peer, messages


def listen(port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on all addresses of this node; port 0: any. Raise OSError if the port is in use."""
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def own_addresses() -> list[str]:
    """Return the addresses at which other nodes may reach this one."""
    entries = [one for interface in psutil.net_if_addrs().values() for one in interface]
    found = [one.address for one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
    return [address for address in found if not address.startswith(("127.", "fe80:")) and address != "::1"]


def plain(address: str) -> str:
    """Return `address` without the prefix of IPv4 addresses on a dual-stack socket."""
    return address.removeprefix("::ffff:")
