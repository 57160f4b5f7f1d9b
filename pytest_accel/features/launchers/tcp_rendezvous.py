"""The rendezvous of a launcher's processes on several machines, and the layout that results.

Rank 0 listens on a TCP port, and the others connect to it (`machine_link`). torchrun's agents share a store
(``TORCHELASTIC_USE_AGENT_STORE``), in which rank 0 leaves its addresses and a random secret. Under other launchers the
user exports the port and provides the secret.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Annotated

import psutil
from msgspec import Meta, Struct

from pytest_accel.core import log
from pytest_accel.core.clock import monotonic
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.core.log import step
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.features.launchers import job_secret
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.local_rendezvous import TIMEOUT, RendezvousError, missing_ranks, still_waits
from pytest_accel.features.launchers.placement import ForkServer, Layout, RankMachine
from pytest_accel.messages.struct_messages import decode, encode

if TYPE_CHECKING:
    from pytest_accel.features.launchers.agent_link import AgentLink
    from pytest_accel.features.launchers.driver_link import DriverLink, RemoteAgent

_PROBE_TIMEOUT = 3.0
"""Seconds that a connection to the store of torchrun's agents may take."""
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

    Raise :class:`RendezvousError` if a variable, the secret or pyzmq is missing.
    """
    if find_spec("zmq") is None:
        raise RendezvousError(
            f"{process.launcher} has started {process.size} processes on several machines, and pyzmq, with which they "
            f"are connected, is not installed on {platform.node()}: pip install 'pytest-accel[cluster]' "
            "(with --accel-launcher off, each process runs all tests by itself)"
        )
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise RendezvousError(
            f"{process.launcher} has started {process.size} processes, {process.local_size} of them on this machine, "
            f"and they have no address to meet at: MASTER_ADDR={address!r}, MASTER_PORT={port!r}. Export MASTER_ADDR, "
            "an address of rank 0's machine at which the others reach it, and MASTER_PORT, a free port there "
            "(with --accel-launcher off, each process runs all tests by itself)"
        )
    try:
        secret = job_secret.read_secret(environ)
    except job_secret.SecretError as error:
        raise RendezvousError(f"rank {process.rank} on {platform.node()}: {error}") from None
    job = (process.launcher, str(process.size), address, port, *process.job)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        key = f"pytest-accel/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return Rendezvous(address, int(port), secret or b"", key, job)
    if secret is None:
        raise RendezvousError(
            f"{process.launcher} has started {process.size} processes on several machines, and rank {process.rank} on "
            f"{platform.node()} has no secret by which they know each other. Export {job_secret.VARIABLE} with the "
            f"same value to all of them, or keep one in {job_secret.FILE}, a file that only you can read and that "
            f"the machines share: {job_secret.HOW_TO_MAKE_ONE} (with --accel-launcher off, each process runs all "
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


def listen(process: LauncherEnv, where: Rendezvous, timeout: float = TIMEOUT) -> DriverLink:
    """Listen for the others, in rank 0; raise :class:`RendezvousError` if that is not possible.

    The addresses are left in the agents' store if there is one, which may take `timeout` seconds.
    """
    from pytest_accel.features.launchers.driver_link import DriverLink

    random = secrets.token_bytes(32)
    port, secret = (where.port, where.secret) if where.key is None else (0, job_secret.mixed(random, where.secret))
    try:
        link = DriverLink(job_secret.driver_key(secret, where.job), port, _warn_wrong_secret)
    except OSError as error:
        raise RendezvousError(f"MASTER_PORT={port}: rank 0 cannot listen there ({error.strerror})") from None
    if log.is_on():
        interfaces = ", ".join(map(" ".join, own_interfaces())) or "loopback only"
        step("listens on %s at port %d of all interfaces: %s", platform.node(), link.port, interfaces)
        step("waits for %s; MASTER_ADDR is %s", ranks_text(list(range(1, process.size))), where.address)
    if where.key is not None:
        step("tells its addresses to the store of torchrun's agents at %s, port %d", where.address, where.port)
        try:
            _ask_store(where, encode(_StoredValue(_addresses(where), link.port, random.hex())).decode(), timeout)
        except RendezvousError:
            link.close()
            raise
    return link


def gather(
    process: LauncherEnv, link: DriverLink, own: Hello, timeout: float = TIMEOUT
) -> tuple[list[RemoteAgent], list[int]]:
    """Wait for the others, in rank 0; return the processes on other machines by rank, and the ranks on this one.

    The ranks on this machine are disconnected: they connect again locally (`local_rendezvous.join`). Raise
    :class:`RendezvousError`, which names the missing ranks, after `timeout` seconds.
    """
    deadline = monotonic() + timeout
    remote: dict[int, RemoteAgent] = {}
    local: set[int] = set()
    while absent := [rank for rank in range(1, process.size) if rank not in remote and rank not in local]:
        agent = None
        with contextlib.suppress(Empty):
            agent = link.joined.get(timeout=max(0.0, deadline - monotonic()))
        if agent is None:
            why = f"; {_WRONG_SECRET}" if link.wrong_secret else ""
            raise RendezvousError(f"{missing_ranks(process, absent, timeout)}{why}")
        hello = agent.hello
        if hello.machine == own.machine:
            local.add(hello.rank)
        else:  # It replaces an earlier connection of the process, whose first greeting took too long.
            remote[hello.rank] = agent
        agent.meet(remote=hello.machine != own.machine)
        step("rank %d on %s has connected%s", hello.rank, hello.host, still_waits(sorted({*absent} - {hello.rank})))
    return [remote[rank] for rank in sorted(remote)], sorted(local)


_WRONG_SECRET = f"a process has called that has another secret ({job_secret.NAMES}), or belongs to another job"


def _warn_wrong_secret() -> None:
    """Print a note. Do not fail: any process can reach the port."""
    step("%s", _WRONG_SECRET)
    print(f"accel: {_WRONG_SECRET}; rank 0 is still waiting", file=sys.stderr, flush=True)


def join(process: LauncherEnv, where: Rendezvous, hello: Hello, timeout: float = TIMEOUT) -> AgentLink | None:
    """Connect this rank to rank 0; return the connection, or None if rank 0 is on the same machine.

    Raise :class:`RendezvousError` if it cannot be reached in `timeout` seconds.
    """
    from pytest_accel.features.launchers import agent_link

    addresses, port, secret = [where.address], where.port, where.secret
    if where.key is not None:
        step("asks the store of torchrun's agents at %s, port %d, for rank 0", where.address, where.port)
        addresses, port, random = _read_store(where, timeout)
        secret = job_secret.mixed(random, where.secret)
    if log.is_on():
        step("looks for rank 0 at %s, port %d", " or ".join(map(_resolved, addresses)), port)
    there = f"{' or '.join(addresses)}, port {port}"
    try:
        return agent_link.call(addresses, port, job_secret.driver_key(secret, where.job), hello, timeout, "rank 0")
    except agent_link.WrongSecret:
        raise RendezvousError(
            f"the process that listens for rank 0 at {there}, has another secret ({job_secret.NAMES}) than rank "
            f"{process.rank} on {hello.host}, or belongs to another job"
        ) from None
    except ConnectionError as error:
        raise RendezvousError(
            f"{process.launcher} has started {process.size} processes, and rank {process.rank} on {hello.host} did not "
            f"reach rank 0 at {there}, within {timeout:g} s: {error}"
        ) from None


def _resolved(address: str) -> str:
    """Return `address` with what it is on this machine if it is a name: another machine's file may differ."""
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(address, None)} - {address}
    except (OSError, ValueError) as error:
        return f"{address} ({error})"
    return f"{address} ({', '.join(sorted(found))})" if found else address


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
    found = [address for _, address in own_interfaces()]
    target = where.address, where.port
    with contextlib.suppress(OSError), socket.create_connection(target, _PROBE_TIMEOUT) as probe:
        found.insert(0, str(probe.getsockname()[0]))
    return list(dict.fromkeys(found))


def layout_of(own: Hello, local: Sequence[int], remote: Sequence[RemoteAgent]) -> Layout:
    """Return the machines of the session: rank 0's first, then in the order of their lowest ranks."""
    groups: dict[str, list[RemoteAgent]] = {}
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


def own_interfaces() -> list[tuple[str, str]]:
    """Return the addresses at which other machines may reach this one, each after the name of its interface."""
    entries = [(name, one) for name, interface in psutil.net_if_addrs().items() for one in interface]
    found = [(name, one.address) for name, one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
    return [(name, at) for name, at in found if not at.startswith(("127.", "fe80:")) and at != "::1"]
