"""How a launcher's processes on several machines find each other, and who of them is where.

Rank 0 listens on a TCP port, and the others call it. torchrun's agents share a store
(``TORCHELASTIC_USE_AGENT_STORE``), in which rank 0 leaves its addresses and a random secret. Under other launchers the
port is the one that the user has exported, and the secret is the user's (`shared_secret`). Both ends prove that they
know it before either says more (`mutual_auth`). Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.core.handshakes import PENDING, Handshake, Handshakes, Refused, perform
from pytest_accel.core.launcher_env import Outer
from pytest_accel.nodes import mutual_auth, shared_secret
from pytest_accel.nodes.agent_messages import Hello, hello_of
from pytest_accel.nodes.mutual_auth import Messages, Peer, WrongSecret
from pytest_accel.nodes.placement import Layout, Node
from pytest_accel.nodes.rendezvous import PATIENCE, MeetingError, missing

_LOOK = 0.1
_CALL_PATIENCE = 3.0
_ANSWER_PATIENCE = 5.0
"""Seconds that a greeting may take; then rank 0 is called once more."""
_WRONG_PATIENCE = 5.0
"""Seconds for which rank 0 is looked for while somebody else listens at its address."""
_ROUNDS = 5

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
    """The user's secret; empty if there is none and the random value in the agents' store suffices."""
    key: str | None
    """Key under which rank 0 leaves its addresses in the agents' store, which listens at `port`. None: rank 0 itself
    listens there."""
    job: tuple[str, ...]
    """Distinguishes this job from others with the same secret."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two machines whose ends have proved themselves."""

    socket: socket.socket
    key: bytes
    """For the codes of its frames."""


@dataclass(frozen=True, slots=True)
class Far:
    """A process on another machine, as the driver has met it."""

    hello: Hello
    link: Link
    address: str
    """Its machine's."""
    own_address: str
    """This machine's, as it has been called."""


def rendezvous(environ: Mapping[str, str], outer: Outer) -> Rendezvous:
    """Read from what the launcher and the user have set; :class:`MeetingError` where something is missing."""
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise MeetingError(
            f"{outer.launcher} has started {outer.size} processes, {outer.local_size} of them on this machine, and "
            f"they do not know where to meet: MASTER_ADDR={address!r}, MASTER_PORT={port!r}. Export MASTER_ADDR, an "
            "address of rank 0's machine at which the others reach it, and MASTER_PORT, a free port there "
            "(--accel-launcher none: each process runs all tests by itself)"
        )
    try:
        secret = shared_secret.read_secret(environ)
    except shared_secret.SecretError as error:
        raise MeetingError(f"rank {outer.rank} on {platform.node()}: {error}") from None
    job = (outer.launcher, str(outer.size), address, port, *outer.job)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        key = f"pytest-accel/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return Rendezvous(address, int(port), secret or b"", key, job)
    if secret is None:
        raise MeetingError(
            f"{outer.launcher} has started {outer.size} processes on several machines, and rank {outer.rank} on "
            f"{platform.node()} has no secret by which they know each other. Export {shared_secret.VARIABLE} with the "
            f"same value to all of them, or keep one in {shared_secret.FILE}, a file that only you can read and that "
            f"the machines share: {shared_secret.HOW_TO_MAKE_ONE} (--accel-launcher none: each process runs all tests "
            "by itself)"
        )
    return Rendezvous(address, int(port), secret, None, job)


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
    """As rank 0: return the processes on other machines by rank, and the ranks on this machine, which connect again.

    :class:`MeetingError` names those who did not come in time.
    """
    deadline = monotonic() + patience
    far: dict[int, Far] = {}
    near: set[int] = set()
    wrong: dict[int, str] = {}
    with _listen(where, outer.size) as listener:
        secret = where.secret
        if where.key is not None:
            random = secrets.token_bytes(32)
            port = listener.getsockname()[1]
            told = json.dumps({"addresses": _addresses(where), "port": port, "secret": random.hex()})
            _ask_store(where, told, patience)
            secret = _mixed(random, where.secret)

        def begin(call: socket.socket) -> Handshake[tuple[Hello, Peer]]:
            note = partial(_note_wrong, wrong, _plain(call.getpeername()[0]))
            return _greet(secret, where.job, outer.size, own, note)

        with Handshakes(listener, begin, outer.size) as handshakes:
            while len(far) + len(near) < outer.size - 1:
                met = handshakes.wait(deadline)
                if met is None:
                    absent = [rank for rank in range(1, outer.size) if rank not in far and rank not in near]
                    notes = [_wrong_text(rank, wrong[rank]) for rank in absent if rank in wrong]
                    raise MeetingError("; ".join([str(missing(outer, absent, patience)), *notes]))
                call, (hello, peer) = met
                if hello.rank in far:  # It has connected again, since the end of the greeting came too late.
                    far.pop(hello.rank).link.socket.close()
                if hello.node == own.node:
                    near.add(hello.rank)
                    call.close()
                    continue
                with contextlib.suppress(OSError):  # It has gone again.
                    addresses = _plain(call.getpeername()[0]), _plain(call.getsockname()[0])
                    far[hello.rank] = Far(hello, Link(call, mutual_auth.key_for(peer, "frames")), *addresses)
    return [far[rank] for rank in sorted(far)], sorted(near)


def call(outer: Outer, where: Rendezvous, hello: Hello, patience: float = PATIENCE) -> tuple[Link, float] | None:
    """As any other rank: the connection to rank 0, and what to add to this machine's clock for the one there.

    None where rank 0 is on the same machine. :class:`MeetingError` if it does not come in time.
    """
    deadline = monotonic() + patience
    addresses, port, secret = [where.address], where.port, where.secret
    if where.key is not None:
        told = json.loads(_ask_store(where, "", patience))
        addresses, port, secret = told["addresses"], told["port"], _mixed(bytes.fromhex(told["secret"]), where.secret)
    wrong_since: float | None = None
    refused = ""
    while monotonic() < deadline and (wrong_since is None or monotonic() < wrong_since + _WRONG_PATIENCE):
        for address in addresses:
            try:
                link = socket.create_connection((address, port), _CALL_PATIENCE)
            except OSError:
                continue
            try:
                until = min(deadline, monotonic() + _ANSWER_PATIENCE)
                far, clock, key = perform(link, _present(secret, where.job, hello), until)
            except (Refused, EOFError, OSError, ValueError) as error:
                link.close()
                if isinstance(error, WrongSecret) and wrong_since is None:
                    wrong_since = monotonic()
                elif isinstance(error, Refused):
                    refused = f"; the process that listens there {error}"
                continue
            if far:
                return Link(link, key), clock
            link.close()
            return None
        time.sleep(_LOOK)
    if wrong_since is not None:
        raise MeetingError(
            f"the process that listens for rank 0 at {' or '.join(addresses)}, port {port}, has another secret "
            f"({shared_secret.NAMES}) than rank {outer.rank} on {hello.host}, or belongs to another job"
        )
    raise MeetingError(
        f"{outer.launcher} has started {outer.size} processes, and rank {outer.rank} on {hello.host} did not reach "
        f"rank 0 at {' or '.join(addresses)}, port {port}, within {patience:g} s{refused}"
    )


def _mixed(random: bytes, users: bytes) -> bytes:
    """Return what takes both secrets to know: who reaches the agents' store can read the one that is there."""
    return hmac.digest(random, users, "sha256")


def _greet(
    secret: bytes, job: Sequence[str], size: int, own: Hello, on_wrong_secret: Callable[[int], None]
) -> Handshake[tuple[Hello, Peer]]:
    peer = yield from mutual_auth.admit_caller(secret, job, range(1, size), on_wrong_secret)
    messages = Messages(peer, caller=False)
    hello = hello_of((yield from messages.receive()))
    if hello.rank != peer.rank:
        raise Refused(f"calls itself rank {hello.rank}, and has proved to be rank {peer.rank}")
    for _ in range(_ROUNDS):
        yield from messages.receive()
        yield messages.pack(monotonic())
    yield messages.pack(hello.node != own.node)
    return hello, peer


def _present(secret: bytes, job: Sequence[str], hello: Hello) -> Handshake[tuple[bool, float, bytes]]:
    """Gives whether rank 0 is on another machine, what to add to this one's clock, and the key for frames."""
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
            raise Refused(f"tells a time that is none: {there!r}")
        # It was asked somewhere between the two, so the shortest round says it best.
        rounds.append((took, there - began - took / 2))
    far = yield from messages.receive()
    return bool(far), min(rounds)[1], mutual_auth.key_for(peer, "frames")


def _note_wrong(wrong: dict[int, str], address: str, rank: int) -> None:
    """Tell the user once, and go on waiting: anybody who reaches the port may claim this."""
    if rank not in wrong:
        wrong[rank] = address
        print(f"accel: {_wrong_text(rank, address)}; still waiting for rank {rank}", file=sys.stderr, flush=True)


def _wrong_text(rank: int, address: str) -> str:
    return f"rank {rank} at {address} has another secret ({shared_secret.NAMES}) than rank 0, or belongs to another job"


def _listen(where: Rendezvous, backlog: int) -> socket.socket:
    port = where.port if where.key is None else 0
    backlog += PENDING
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    try:
        return socket.create_server(("", port), backlog=backlog)
    except OSError as error:
        why = os.strerror(error.errno or 0)  # Without what the library adds.
        raise MeetingError(f"MASTER_PORT={port}: rank 0 cannot listen there ({why})") from None


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
