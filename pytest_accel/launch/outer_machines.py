"""How a launcher's processes on several machines find each other, and who of them is where.

Rank 0 listens on a TCP port, and the others call it. torchrun's agents share a store
(``TORCHELASTIC_USE_AGENT_STORE``), in which rank 0 leaves its addresses and a random secret. Under other launchers the
port is the one that the user has exported. What comes over a connection is unpickled only after the other end has shown
that it knows the secret (`multiprocessing.connection`: HMAC of a challenge, both ways). Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import psutil

from pytest_accel.clock import monotonic
from pytest_accel.launch.outer import Outer
from pytest_accel.launch.outer_meeting import PATIENCE, MeetingError, missing
from pytest_accel.launch.outer_messages import Hello, Place
from pytest_accel.worlds.layout import Layout, Node

SECRET = "PYTEST_ACCEL_SECRET"
"""The variable for a secret of the user's own, where the launcher has no store for one."""
_LOOK = 0.1
_CALL_PATIENCE = 3.0
_ANSWER_PATIENCE = 5
"""Seconds that a process may take for the next word of the greeting."""
_ROUNDS = 5
_CLOCK = struct.Struct("<d")
_STRANGER = (AuthenticationError, AssertionError, EOFError, OSError)
"""What the greeting of somebody who is none of the job's processes comes to."""

_STORE = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore

host, port, key, seconds = sys.argv[1:]
store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=float(seconds)))
value = sys.stdin.read()
if value:
    store.set(key, value)
else:
    sys.stdout.write(store.get(key).decode())
"""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the processes meet."""

    address: str
    port: int
    secret: bytes
    key: str | None
    """That of rank 0's addresses in the agents' store, which is at the port then; None: rank 0 listens there itself."""


@dataclass(frozen=True, slots=True)
class Far:
    """A process on another machine, as the driver has met it."""

    hello: Hello
    connection: Connection
    address: str
    """Its machine's."""
    own_address: str
    """This machine's, as it has been called."""


def rendezvous(environ: Mapping[str, str], outer: Outer) -> Rendezvous:
    """Read from what the launcher has set; :class:`MeetingError` where something is missing."""
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise MeetingError(
            f"{outer.launcher} has started {outer.size} processes, {outer.local_size} of them on this machine, and "
            f"they do not know where to meet: MASTER_ADDR={address!r}, MASTER_PORT={port!r}. Export MASTER_ADDR, an "
            "address of rank 0's machine at which the others reach it, and MASTER_PORT, a free port there "
            "(--accel-launcher none: each process runs all tests by itself)"
        )
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        key = f"pytest-accel/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return Rendezvous(address, int(port), b"", key)
    parts = (outer.launcher, str(outer.size), address, port, str(os.getuid()), environ.get(SECRET, ""))
    return Rendezvous(address, int(port), hashlib.sha256("\0".join(parts).encode()).digest(), None)


def identity() -> str:
    """What tells this machine, or container, from others.

    Processes with one identity see the same file systems, process ids and network (namespaces(7)).
    """
    found = [platform.node()]
    with contextlib.suppress(OSError):
        found = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        found += [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")]
    return " ".join(found)


def receive(outer: Outer, where: Rendezvous, own: Hello, patience: float = PATIENCE) -> tuple[list[Far], list[int]]:
    """As rank 0: those on other machines, by rank, and the ranks of those on this one, who call once more.

    :class:`MeetingError` names those who did not come in time.
    """
    deadline = monotonic() + patience
    far: dict[int, Far] = {}
    near: list[int] = []
    with _listen(where) as listener:
        secret = where.secret
        if where.key is not None:
            secret = secrets.token_bytes(32)
            port = listener.getsockname()[1]
            told = json.dumps({"addresses": _addresses(where), "port": port, "secret": secret.hex()})
            _ask_store(where, told, patience)
        while len(far) + len(near) < outer.size - 1:
            listener.settimeout(max(0.001, deadline - monotonic()))
            try:
                call, peer = listener.accept()
            except TimeoutError:
                absent = [rank for rank in range(1, outer.size) if rank not in far and rank not in near]
                raise missing(outer, absent, patience) from None
            own_address = _plain(call.getsockname()[0])
            connection = _connection(call)
            with contextlib.suppress(*_STRANGER):
                hello = _greet(connection, secret, own)
                if hello.node == own.node:
                    near.append(hello.rank)
                    connection.close()
                else:
                    far[hello.rank] = Far(hello, connection, _plain(peer[0]), own_address)
                continue
            connection.close()
    return [far[rank] for rank in sorted(far)], near


def call(outer: Outer, where: Rendezvous, hello: Hello, patience: float = PATIENCE) -> tuple[Connection, float] | None:
    """As any other rank: the connection to rank 0, and what to add to this machine's clock for the one there.

    None where rank 0 is on the same machine. :class:`MeetingError` if it does not come in time.
    """
    deadline = monotonic() + patience
    addresses, port, secret = [where.address], where.port, where.secret
    if where.key is not None:
        told = json.loads(_ask_store(where, "", patience))
        addresses, port, secret = told["addresses"], told["port"], bytes.fromhex(told["secret"])
    while monotonic() < deadline:
        for address in addresses:
            try:
                connection = _connection(socket.create_connection((address, port), _CALL_PATIENCE))
            except OSError:
                continue
            try:
                place, clock = _present(connection, secret, hello)
            except _STRANGER:
                connection.close()
                continue
            if place.far:
                return connection, clock
            connection.close()
            return None
        time.sleep(_LOOK)
    raise MeetingError(
        f"{outer.launcher} has started {outer.size} processes, and rank {outer.rank} on {hello.host} did not reach "
        f"rank 0 at {' or '.join(addresses)}, port {port}, within {patience:g} s"
    )


def _greet(connection: Connection, secret: bytes, own: Hello) -> Hello:
    deliver_challenge(connection, secret)
    answer_challenge(connection, secret)
    hello: Hello = connection.recv()
    for _ in range(_ROUNDS):
        connection.recv_bytes(_CLOCK.size)
        connection.send_bytes(_CLOCK.pack(monotonic()))
    connection.send(Place(far=hello.node != own.node))
    return hello


def _present(connection: Connection, secret: bytes, hello: Hello) -> tuple[Place, float]:
    answer_challenge(connection, secret)
    deliver_challenge(connection, secret)
    connection.send(hello)
    rounds = []
    for _ in range(_ROUNDS):
        began = monotonic()
        connection.send_bytes(_CLOCK.pack(began))
        (there,) = _CLOCK.unpack(connection.recv_bytes(_CLOCK.size))
        took = monotonic() - began
        # It was asked somewhere between the two, so the shortest round says it best.
        rounds.append((took, there - began - took / 2))
    place: Place = connection.recv()
    return place, min(rounds)[1]


def _connection(call: socket.socket) -> Connection:
    call.settimeout(None)
    call.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _ANSWER_PATIENCE, 0))
    return Connection(call.detach())


def _listen(where: Rendezvous) -> socket.socket:
    port = where.port if where.key is None else 0
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise MeetingError(f"MASTER_PORT={port}: rank 0 cannot listen there ({error.strerror})") from None


def _ask_store(where: Rendezvous, value: str, patience: float) -> str:
    """Leave `value` in the agents' store, or get what was left, where it is empty.

    In a process of its own, since the protocol is torch's, and this process is not to import that.
    """
    assert where.key is not None
    command = [sys.executable, "-c", _STORE, where.address, str(where.port), where.key, str(patience)]
    done = subprocess.run(command, input=value, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise MeetingError(f"the store of torchrun's agents at {where.address}:{where.port} cannot be used: {last}")
    return done.stdout


def _addresses(where: Rendezvous) -> list[str]:
    """Those at which others may reach this machine: first the one from which the agents' store is reached."""
    known = [one for interface in psutil.net_if_addrs().values() for one in interface]
    found = [one.address for one in known if one.family in (socket.AF_INET, socket.AF_INET6)]
    found = [address for address in found if not address.startswith(("127.", "fe80:")) and address != "::1"]
    target = where.address, where.port
    with contextlib.suppress(OSError), socket.create_connection(target, _CALL_PATIENCE) as probe:
        found.insert(0, _plain(probe.getsockname()[0]))
    return list(dict.fromkeys(found))


def _plain(address: str) -> str:
    """An address as a person writes it, also of IPv4 on a socket for both."""
    return address.removeprefix("::ffff:")


def layout_of(own: Hello, near: Sequence[int], far: Sequence[Far]) -> Layout:
    """The machines: rank 0's first, then in the order of their lowest ranks."""
    groups: dict[str, list[Far]] = {}
    for one in far:
        groups.setdefault(one.hello.node, []).append(one)
    names = [own.host, *(group[0].hello.host for group in groups.values())]
    nodes = [Node(own.host, far[0].own_address if far else "", (0, *sorted(near)))]
    for group in groups.values():
        name, address = group[0].hello.host, group[0].address
        shown = f"{name} ({address})" if names.count(name) > 1 else name
        nodes.append(Node(shown, address, tuple(one.hello.rank for one in group)))
    return Layout(tuple(nodes))
