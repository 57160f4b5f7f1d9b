"""The rendezvous of a launcher's processes on several machines, over TCP, and the layout that results.

Rank 0 listens on a TCP port, and the others connect to it. torchrun's agents share a store
(``TORCHELASTIC_USE_AGENT_STORE``), in which rank 0 leaves its addresses and a random secret. Under other launchers the
user exports the port and provides the secret. Both ends prove that they know the secret before they exchange anything
else (`authentication`). Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
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
from typing import Annotated

from msgspec import Meta, Struct

from pytest_accel.core import log
from pytest_accel.core.clock import monotonic
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.core.log import step, step_once
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.features.launchers import authentication, greeting
from pytest_accel.features.launchers.agent_messages import Hello, Meeting
from pytest_accel.features.launchers.authentication import SealedFrames, WrongSecret
from pytest_accel.features.launchers.greeting import AuthenticatedLink, RemotePeer
from pytest_accel.features.launchers.handshakes import PENDING, Handshake, Handshakes, Refused, perform
from pytest_accel.features.launchers.local_rendezvous import TIMEOUT, RendezvousError, missing_ranks, still_waits
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.pool.placement import ForkServer, Layout, RankMachine

_RETRY_INTERVAL = 0.1
"""Seconds between two attempts to connect to rank 0."""
_CALL_TIMEOUT = 3.0
"""Seconds that one attempt to connect may take."""
_ANSWER_TIMEOUT = 5.0
"""Seconds that a greeting may take before the connection to rank 0 is retried."""
_WRONG_TIMEOUT = 5.0
"""Seconds for which to retry while a process with another secret listens at rank 0's address."""
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
"""Program of the process that accesses the store of torchrun's agents (`_ask_store`)."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address at which the processes meet, and the secret."""

    address: str
    port: int
    secret: bytes
    """The user's secret; empty if there is none and the random value in the agents' store suffices."""
    key: str | None
    """Key under which rank 0 leaves its addresses in the agents' store, which listens at `port`. None: rank 0 itself
    listens there."""
    job: tuple[str, ...]
    """Distinguishes this job from others with the same secret."""


class _StoredValue(Struct, frozen=True):
    """The value that rank 0 leaves in the agents' store."""

    addresses: list[str]
    """The addresses at which rank 0 may be reached."""
    port: Annotated[int, Meta(ge=1, le=0xFFFF)]
    secret: str
    """Random bytes, in hexadecimal digits."""


def read_rendezvous(environ: Mapping[str, str], process: LauncherEnv) -> Rendezvous:
    """Return the rendezvous that the launcher's and the user's variables describe.

    Raise :class:`RendezvousError` if a variable or the secret is missing.
    """
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise RendezvousError(
            f"{process.launcher} has started {process.size} processes, {process.local_size} of them on this machine, "
            f"and they have no address to meet at: MASTER_ADDR={address!r}, MASTER_PORT={port!r}. Export MASTER_ADDR, "
            "an address of rank 0's machine at which the others reach it, and MASTER_PORT, a free port there "
            "(with --accel-launcher off, each process runs all tests by itself)"
        )
    try:
        secret = authentication.read_secret(environ)
    except authentication.SecretError as error:
        raise RendezvousError(f"rank {process.rank} on {platform.node()}: {error}") from None
    job = (process.launcher, str(process.size), address, port, *process.job)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        key = f"pytest-accel/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return Rendezvous(address, int(port), secret or b"", key, job)
    if secret is None:
        raise RendezvousError(
            f"{process.launcher} has started {process.size} processes on several machines, and rank {process.rank} on "
            f"{platform.node()} has no secret by which they know each other. Export {authentication.VARIABLE} with the "
            f"same value to all of them, or keep one in {authentication.FILE}, a file that only you can read and that "
            f"the machines share: {authentication.HOW_TO_MAKE_ONE} (with --accel-launcher off, each process runs all "
            "tests by itself)"
        )
    return Rendezvous(address, int(port), secret, None, job)


def machine_identity() -> str:
    """Return a text that identifies this machine or container.

    Processes with the same identity see the same file systems, process ids and network (namespaces(7)).
    """
    found = [platform.node()]
    with contextlib.suppress(OSError):
        found = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()]
        found += [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")]
    return " ".join(found)


def gather(
    process: LauncherEnv, where: Rendezvous, own: Hello, timeout: float = TIMEOUT
) -> tuple[list[RemotePeer], list[int]]:
    """Wait for the others, in rank 0; return the processes on other machines by rank, and the ranks on this one.

    The ranks on this machine are disconnected: they connect again locally (`local_rendezvous.join`). Raise
    :class:`RendezvousError`, which names the missing ranks, after `timeout` seconds.
    """
    deadline = monotonic() + timeout
    remote: dict[int, RemotePeer] = {}
    local: set[int] = set()
    absent = list(range(1, process.size))
    wrong: dict[int, str] = {}
    with _listen(where, process.size) as listener:
        secret, port = where.secret, listener.getsockname()[1]
        if log.is_on():
            interfaces = ", ".join(map(" ".join, greeting.own_interfaces())) or "loopback only"
            step("listens on %s at port %d of all interfaces: %s", own.host, port, interfaces)
            step("waits for %s; MASTER_ADDR is %s", ranks_text(absent), where.address)
        if where.key is not None:
            random = secrets.token_bytes(32)
            step("tells its addresses to the store of torchrun's agents at %s, port %d", where.address, where.port)
            value = _StoredValue(_addresses(where), port, random.hex())
            _ask_store(where, encode(value).decode(), timeout)
            secret = _mixed(random, where.secret)

        def begin(call: socket.socket) -> Handshake[tuple[Hello, SealedFrames]]:
            note = partial(_note_wrong, wrong, greeting.plain(call.getpeername()[0]))
            return _greet_caller(secret, where.job, process.size, own, note)

        with Handshakes(listener, begin, process.size) as handshakes:
            while absent:
                met = handshakes.wait(deadline)
                if met is None:
                    notes = [_wrong_text(rank, wrong[rank]) for rank in absent if rank in wrong]
                    raise RendezvousError("; ".join([str(missing_ranks(process, absent, timeout)), *notes]))
                call, (hello, frames) = met
                if hello.rank in remote:  # The process has retried, since its first greeting took too long.
                    remote.pop(hello.rank).link.socket.close()
                if hello.machine == own.machine:
                    local.add(hello.rank)
                    call.close()
                else:
                    with contextlib.suppress(OSError):  # The process has disconnected.
                        remote[hello.rank] = greeting.remote_peer(call, hello, frames)
                absent = [rank for rank in range(1, process.size) if rank not in remote and rank not in local]
                step("rank %d on %s has connected%s", hello.rank, hello.host, still_waits(absent))
    return [remote[rank] for rank in sorted(remote)], sorted(local)


def join(
    process: LauncherEnv, where: Rendezvous, hello: Hello, timeout: float = TIMEOUT
) -> tuple[AuthenticatedLink, float] | None:
    """Connect this rank to rank 0; return the connection, and the seconds by which the clock of rank 0 is ahead.

    Return None if rank 0 is on the same machine. Raise :class:`RendezvousError` if it cannot be reached in `timeout`
    seconds.
    """
    deadline = monotonic() + timeout
    addresses, port, secret = [where.address], where.port, where.secret
    if where.key is not None:
        step("asks the store of torchrun's agents at %s, port %d, for rank 0", where.address, where.port)
        addresses, port, random = _read_store(where, timeout)
        secret = _mixed(random, where.secret)
    wrong_since: float | None = None
    refused = ""
    seen: set[str] = set()
    if log.is_on():
        step("looks for rank 0 at %s, port %d", " or ".join(map(_resolved, addresses)), port)
    while monotonic() < deadline and (wrong_since is None or monotonic() < wrong_since + _WRONG_TIMEOUT):
        for address in addresses:
            try:
                link = socket.create_connection((address, port), _CALL_TIMEOUT)
            except (OSError, ValueError) as error:  # ValueError: the address cannot be a host's name.
                step_once(seen, "cannot connect to rank 0 at %s, port %d: %s", address, port, error)
                continue
            try:
                until = min(deadline, monotonic() + _ANSWER_TIMEOUT)
                remote, clock, frames = perform(link, _greet_rank_0(secret, where.job, hello), until)
            except (Refused, EOFError, OSError, ValueError) as error:
                link.close()
                step_once(seen, "what listens at %s, port %d, is no rank 0 of this job: %r", address, port, error)
                if isinstance(error, WrongSecret) and wrong_since is None:
                    wrong_since = monotonic()
                elif isinstance(error, Refused):
                    refused = f"; the process that listens there {error}"
                continue
            step("is connected to rank 0 at %s, port %d", address, port)
            if remote:
                return AuthenticatedLink(link, frames), clock
            link.close()
            return None
        time.sleep(_RETRY_INTERVAL)
    if wrong_since is not None:
        raise RendezvousError(
            f"the process that listens for rank 0 at {' or '.join(addresses)}, port {port}, has another secret "
            f"({authentication.NAMES}) than rank {process.rank} on {hello.host}, or belongs to another job"
        )
    raise RendezvousError(
        f"{process.launcher} has started {process.size} processes, and rank {process.rank} on {hello.host} did not "
        f"reach rank 0 at {' or '.join(addresses)}, port {port}, within {timeout:g} s{refused}"
    )


def _resolved(address: str) -> str:
    """Return `address` with what it is on this machine if it is a name: another machine's file may differ."""
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(address, None)} - {address}
    except (OSError, ValueError) as error:
        return f"{address} ({error})"
    return f"{address} ({', '.join(sorted(found))})" if found else address


def _mixed(random: bytes, users: bytes) -> bytes:
    """Return a secret derived from both, since every process that reaches the agents' store can read the random one."""
    return hmac.digest(random, users, "sha256")


def _greet_caller(
    secret: bytes, job: Sequence[str], size: int, own: Hello, on_wrong_secret: Callable[[int], None]
) -> Handshake[tuple[Hello, SealedFrames]]:
    """Greet a caller, as rank 0; return its greeting and the frames of the connection."""
    hello, frames = yield from greeting.greet_caller(secret, job, range(1, size), on_wrong_secret)
    yield frames.pack(encode(Meeting(hello.machine != own.machine)))
    return hello, frames


def _greet_rank_0(secret: bytes, job: Sequence[str], hello: Hello) -> Handshake[tuple[bool, float, SealedFrames]]:
    """Greet rank 0; return True if it is on another machine, the seconds to add to this clock, and the frames."""
    clock, frames = yield from greeting.greet_listener(secret, job, hello)
    met = greeting.read((yield from frames.receive()), Meeting)
    return met.remote, clock, frames


def _note_wrong(wrong: dict[int, str], address: str, rank: int) -> None:
    """Print a note, once for each rank. Do not fail: any process that reaches the port can claim to be the rank."""
    if rank not in wrong:
        wrong[rank] = address
        step("%s", _wrong_text(rank, address))
        print(f"accel: {_wrong_text(rank, address)}; still waiting for rank {rank}", file=sys.stderr, flush=True)


def _wrong_text(rank: int, address: str) -> str:
    return (
        f"rank {rank} at {address} has another secret ({authentication.NAMES}) than rank 0, or belongs to another job"
    )


def _listen(where: Rendezvous, expected: int) -> socket.socket:
    port = where.port if where.key is None else 0
    try:
        return greeting.listen(port, expected + PENDING)
    except OSError as error:
        why = os.strerror(error.errno or 0)  # The library's text repeats the address.
        raise RendezvousError(f"MASTER_PORT={port}: rank 0 cannot listen there ({why})") from None


def _ask_store(where: Rendezvous, value: str, timeout: float) -> str:
    """Set the value in the agents' store to `value`; if that is empty, wait for a value and return it.

    A separate process does this: the protocol is torch's, and this process must not import torch.
    """
    assert where.key is not None
    command = python_command(_STORE, where.address, str(where.port), where.key, str(timeout), path=sys.path)
    done = subprocess.run(command, input=value, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RendezvousError(f"the store of torchrun's agents at {where.address}:{where.port} cannot be used: {last}")
    return done.stdout


def _read_store(where: Rendezvous, timeout: float) -> tuple[list[str], int, bytes]:
    """Wait until rank 0 has set the value in the agents' store; return its addresses, its port and the random secret.

    Raise :class:`RendezvousError` if the value is malformed: every process that reaches the store can set it.
    """
    try:
        value: _StoredValue = decode(_ask_store(where, "", timeout).encode(), _StoredValue)
        return value.addresses, value.port, bytes.fromhex(value.secret)
    except ValueError as error:
        raise RendezvousError(
            f"the store of torchrun's agents at {where.address}:{where.port} has no valid value of rank 0 at "
            f"{where.key}: {error}"
        ) from None


def _addresses(where: Rendezvous) -> list[str]:
    """Return the addresses at which others may reach this machine, beginning with the one used to reach the store."""
    found = greeting.own_addresses()
    target = where.address, where.port
    with contextlib.suppress(OSError), socket.create_connection(target, _CALL_TIMEOUT) as probe:
        found.insert(0, greeting.plain(probe.getsockname()[0]))
    return list(dict.fromkeys(found))


def layout_of(own: Hello, local: Sequence[int], remote: Sequence[RemotePeer]) -> Layout:
    """Return the machines of the session: rank 0's first, then in the order of their lowest ranks."""
    groups: dict[str, list[RemotePeer]] = {}
    for one in remote:
        groups.setdefault(one.hello.machine, []).append(one)
    names = [own.host, *(group[0].hello.host for group in groups.values())]
    machines = [RankMachine(own.host, remote[0].own_address if remote else "", _servers([0, *sorted(local)]))]
    for group in groups.values():
        name, address = group[0].hello.host, group[0].address
        shown = f"{name} ({address})" if names.count(name) > 1 else name
        machines.append(RankMachine(shown, address, _servers([one.hello.rank for one in group])))
    return Layout(tuple(machines))


def _servers(ranks: Sequence[int]) -> tuple[ForkServer, ...]:
    """Return the fork servers of the launched processes `ranks`. Each forks at most one rank of a world."""
    return tuple(ForkServer(rank, 1) for rank in ranks)
