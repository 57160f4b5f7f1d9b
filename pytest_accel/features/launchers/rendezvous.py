"""The rendezvous of a launcher's processes: at a Unix socket on rank 0's machine, and over the network from others.

The path of the Unix socket follows from user, job and machine. For processes of other machines, rank 0 listens on a TCP
port, too (`machine_link`). torchrun's agents share a store (``TORCHELASTIC_USE_AGENT_STORE``), in which rank 0 leaves
its addresses and a random secret. Under other launchers the user exports the port and provides the secret.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import psutil
from msgspec import Meta, Struct

from pytest_accel.core import log
from pytest_accel.core.clock import monotonic
from pytest_accel.core.folder_trust import TEMPORARY, ensure_own_folder, ensure_safe
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.core.log import step, step_once
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.features.launchers import job_secret
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.job_secret import WrongSecret
from pytest_accel.leases.shared_folder import VARIABLE
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.struct_messages import LENGTH, decode, encode
from pytest_accel.messages.unix_sockets import Connection

if TYPE_CHECKING:
    from pytest_accel.features.launchers.machine_link import AgentLink, DriverLink

TIMEOUT = 60.0
"""Seconds that a process waits for the others."""
_LONGEST = 1 << 24
"""Maximum size of a greeting, in bytes; command lines may be long."""
_GREETING_TIMEOUT = 5
"""Seconds that a process of this user may take to send its greeting, while the others wait."""
_RETRY_INTERVAL = 0.05
"""Seconds between two attempts to connect to rank 0."""
_REFUSED_TIMEOUT = 5.0
"""Seconds for which to retry while a process with another secret listens at rank 0's address."""
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
_ALONE = "(with --accel-launcher off, each process runs all tests by itself)"
_WRONG_SECRET = f"a process has called that has another secret ({job_secret.NAMES}), or belongs to another job"
Greeting = TypeVar("Greeting")


class RendezvousError(Exception):
    """The processes did not find each other; the message says why, and names missing ranks."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which processes of several machines meet, and the secret."""

    host: str
    port: int
    secret: bytes
    """The user's secret; empty if there is none and the random value in the agents' store suffices."""
    key: str | None
    """Key under which rank 0 leaves its addresses in the agents' store, which listens at `port`; None if rank 0
    itself listens there."""
    job: tuple[str, ...]
    """Distinguishes this job from others with the same secret."""

    @property
    def text(self) -> str:
        return f"{self.host}:{self.port}"


class _StoredValue(Struct, frozen=True):
    """The value that rank 0 leaves in the agents' store."""

    addresses: list[str]
    """The addresses at which rank 0 may be reached."""
    port: Annotated[int, Meta(ge=1, le=0xFFFF)]
    secret: str
    """Random bytes, in hexadecimal digits."""


def find_address(environ: Mapping[str, str], process: LauncherEnv) -> Address | None:
    """Return the address that the launcher's and the user's variables describe; None if there is one machine only.

    Raise :class:`RendezvousError` if a variable, the secret or pyzmq is missing.
    """
    if process.local_size == process.size:
        return None
    started = f"{process.launcher} has started {process.size} processes"
    if find_spec("zmq") is None:
        raise RendezvousError(
            f"{started} on several machines, and pyzmq, with which they are connected, is not installed on "
            f"{platform.node()}: pip install 'pytest-accel[cluster]' {_ALONE}"
        )
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise RendezvousError(
            f"{started}, {process.local_size} of them on this machine, and they have no address to meet at: "
            f"MASTER_ADDR={host!r}, MASTER_PORT={port!r}. Export MASTER_ADDR, an address of rank 0's machine at which "
            f"the others reach it, and MASTER_PORT, a free port there {_ALONE}"
        )
    try:
        secret = job_secret.read_secret(environ)
    except job_secret.SecretError as error:
        raise RendezvousError(f"rank {process.rank} on {platform.node()}: {error}") from None
    job = (process.launcher, str(process.size), host, port, *process.job)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        key = f"pytest-accel/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return Address(host, int(port), secret or b"", key, job)
    if secret is None:
        raise RendezvousError(
            f"{started} on several machines, and rank {process.rank} on {platform.node()} has no secret by which they "
            f"know each other. Export {job_secret.VARIABLE} with the same value to all of them, or keep one in "
            f"{job_secret.FILE}, a file that only you can read and that the machines share: "
            f"{job_secret.HOW_TO_MAKE_ONE} {_ALONE}"
        )
    return Address(host, int(port), secret, None, job)


def machine_identity() -> str:
    """Return a text that identifies this machine or container.

    Processes with the same identity see the same file systems, process ids and network (namespaces(7)).
    """
    found = [platform.node()]
    with suppress(OSError):
        found = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()]
        found += [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")]
    return " ".join(found)


def rendezvous_path(process: LauncherEnv, machine: str = "") -> str:
    """Return the path of rank 0's socket; it differs for sessions with different lock folders, and for machines.

    Raise :class:`RendezvousError` if the folder cannot be used, for example because another user could listen there.
    """
    folder = os.path.join(TEMPORARY, f"pytest-accel-{os.geteuid()}")
    try:
        ensure_safe(TEMPORARY)
        ensure_own_folder(folder)
    except OSError as error:
        raise RendezvousError(
            f"{error.filename}, where the processes that {process.launcher} has started would meet, cannot be used: "
            f"{error.strerror}"
        ) from None
    locks = hashlib.sha256(os.fsencode(os.environ.get(VARIABLE, ""))).hexdigest()[:8]
    where = hashlib.sha256(machine.encode()).hexdigest()[:8]
    return os.path.join(folder, f"{locks}-{where}-{process.key}.sock")


# Rank 0


def gather(
    process: LauncherEnv, own: Hello, where: Address | None, timeout: float = TIMEOUT
) -> tuple[dict[int, tuple[Hello, Connection]], DriverLink | None]:
    """Wait for all other processes, in rank 0; return their greetings and connections, and the link to other machines.

    Raise :class:`RendezvousError`, which names the missing ranks, after `timeout` seconds.
    """
    path = rendezvous_path(process, own.machine)
    deadline = monotonic() + timeout
    found: dict[int, tuple[Hello, Connection]] = {}
    link: DriverLink | None = None
    with _listen(path, process) as listener:
        try:
            if where is None:
                step("listens at %s; waits for %s", path, ranks_text(range(1, process.size)))
            else:
                link = _listen_to_machines(process, where, path, timeout)
            while absent := [rank for rank in range(1, process.size) if rank not in found]:
                met = accept(listener, Hello, deadline - monotonic())
                if met is None and monotonic() >= deadline:
                    raise RendezvousError(
                        f"{process.launcher} has started {process.size} processes, and {ranks_text(absent)} did not "
                        f"connect within {timeout:g} s: each process must run pytest with this plugin {_ALONE}"
                        + (f"; {_WRONG_SECRET}" if link is not None and link.wrong_secret else "")
                    )
                if met is None or not 0 < met[1].rank < process.size:
                    continue
                call, hello = met
                if hello.rank in found:  # A process whose first call took too long calls again.
                    found[hello.rank][1].close()
                found[hello.rank] = hello, Connection(call.detach())
                left = [rank for rank in absent if rank != hello.rank]
                more = f"; still waits for {ranks_text(left)}" if left else ""
                where_text = "of this machine" if where is None else f"on {hello.host}"
                step("rank %d %s has connected%s", hello.rank, where_text, more)
        except BaseException:
            for _, connection in found.values():
                connection.close()
            if link is not None:
                link.close()
            raise
        finally:
            os.unlink(path)
    return {rank: found[rank] for rank in sorted(found)}, link


def accept(listener: socket.socket, form: type[Greeting], timeout: float) -> tuple[socket.socket, Greeting] | None:
    """Wait for a process of this user, and return its connection and its greeting, which has the type `form`.

    Return None if no process has connected within `timeout` seconds, or if it has sent something else.
    """
    if not unix_sockets.is_readable(listener.fileno(), max(0.0, timeout)):
        return None
    listener.setblocking(False)  # The process may be another user's.
    try:
        call = unix_sockets.accept(listener)
    except OSError:
        return None
    greeting = read_greeting(call, form)
    return None if greeting is None else (call, greeting)


def read_greeting(call: socket.socket, form: type[Greeting]) -> Greeting | None:
    """Return the first message on `call`, which has the type `form`; for another message, close `call`."""
    try:
        unix_sockets.limit_reads(call, _GREETING_TIMEOUT)
        (length,) = LENGTH.unpack(call.recv(LENGTH.size, socket.MSG_WAITALL))
        if not 0 < length <= _LONGEST:
            raise ValueError(length)
        greeting: Greeting = decode(call.recv(length, socket.MSG_WAITALL), form)
        unix_sockets.limit_reads(call, 0)
    except (OSError, ValueError, struct.error):
        call.close()
        return None
    return greeting


def _listen(path: str, process: LauncherEnv) -> socket.socket:
    try:
        unix_sockets.connect(path).close()
    except PermissionError as error:
        raise RendezvousError(f"rank 0 cannot listen at {path}: {error.strerror}") from None
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(path)  # The socket of a process that was killed.
    else:
        raise RendezvousError(
            f"another session under {process.launcher} with the job {'/'.join(process.job)} is starting"
        )
    return unix_sockets.listen(path, process.size)


def _listen_to_machines(process: LauncherEnv, where: Address, path: str, timeout: float) -> DriverLink:
    """Listen for processes of other machines, which are connected to `path`; raise :class:`RendezvousError` if that is
    not possible.

    If the agents have a store, the addresses are left there, which may take `timeout` seconds.
    """
    from pytest_accel.features.launchers.machine_link import DriverLink

    random, answer = secrets.token_bytes(32), partial(unix_sockets.connect, path)
    port, secret = (where.port, where.secret) if where.key is None else (0, job_secret.mixed(random, where.secret))
    try:
        link = DriverLink(job_secret.driver_key(secret, where.job), port, answer, _warn_wrong_secret)
    except OSError as error:
        raise RendezvousError(f"MASTER_PORT={port}: rank 0 cannot listen there ({error.strerror})") from None
    if log.is_on():
        interfaces = ", ".join(map(" ".join, own_interfaces())) or "loopback only"
        step("listens on %s at port %d of all interfaces: %s", platform.node(), link.port, interfaces)
        step("waits for %s; MASTER_ADDR is %s", ranks_text(range(1, process.size)), where.host)
    if where.key is not None:
        step("tells its addresses to the store of torchrun's agents at %s, port %d", where.host, where.port)
        try:
            _ask_store(where, encode(_StoredValue(_addresses(where), link.port, random.hex())).decode(), timeout)
        except RendezvousError:
            link.close()
            raise
    return link


def _warn_wrong_secret() -> None:
    """Print a note. Do not fail: any process can reach the port."""
    step("%s", _WRONG_SECRET)
    print(f"accel: {_WRONG_SECRET}; rank 0 is still waiting", file=sys.stderr, flush=True)


# The other ranks


def join(process: LauncherEnv, own: Hello, where: Address | None, timeout: float = TIMEOUT) -> Connection | AgentLink:
    """Connect this rank to rank 0; return the connection, or the link if rank 0 is on another machine.

    Raise :class:`RendezvousError` if it cannot be reached in `timeout` seconds.
    """
    path = there = rendezvous_path(process, own.machine)
    addresses: list[str] = []
    port, key = 0, b""
    if where is None:
        step("looks for rank 0 at %s", path)
    else:
        addresses, port, secret = [where.host], where.port, where.secret
        if where.key is not None:
            step("asks the store of torchrun's agents at %s, port %d, for rank 0", where.host, where.port)
            addresses, port, random = _read_store(where, timeout)
            secret = job_secret.mixed(random, where.secret)
        if log.is_on():
            step("looks for rank 0 at %s, port %d", " or ".join(map(_resolved, addresses)), port)
        key = job_secret.driver_key(secret, where.job)
        there = f"{' or '.join(addresses)}, port {port}"
    try:
        return call(addresses, port, key, timeout, "rank 0", path)
    except WrongSecret:
        raise RendezvousError(
            f"the process that listens for rank 0 at {there}, has another secret ({job_secret.NAMES}) than rank "
            f"{process.rank} on {own.host}, or belongs to another job"
        ) from None
    except ConnectionError as error:
        raise RendezvousError(
            f"{process.launcher} has started {process.size} processes, and rank {process.rank} on {own.host} did not "
            f"reach rank 0 at {there}, within {timeout:g} s: {error}"
        ) from None


def call(
    addresses: Sequence[str], port: int, key: bytes, timeout: float, driver: str, path: str | None = None
) -> AgentLink | Connection:
    """Connect to the driver: at the Unix socket `path` if it listens there, or at one of `addresses`.

    `driver` is its name in the log. Retry for `timeout` seconds, then raise ConnectionError with the reason for each
    address. If a process that listens there refuses the connection for some seconds, raise :class:`WrongSecret`.
    """
    deadline = monotonic() + timeout
    refused_since: float | None = None
    errors: dict[str, str] = {}
    seen: set[str] = set()
    while True:
        if path is not None and (connection := _call_here(path, driver)) is not None:
            return connection
        for address in addresses:
            from pytest_accel.features.launchers import machine_link  # Imported here, since it needs pyzmq.

            try:
                link = machine_link.call(address, port, key)
            except (OSError, ValueError) as error:  # ValueError: the address cannot be a host's name.
                errors[address] = f"{address}: {error}"
                step_once(seen, "cannot connect to %s at %s, port %d: %s", driver, address, port, error)
                if isinstance(error, WrongSecret):
                    refused_since = refused_since or monotonic()
                    if monotonic() >= refused_since + _REFUSED_TIMEOUT:
                        raise
                continue
            # The driver listens at the path before it does at the port: if it is on this machine, the path works now.
            if path is not None and (connection := _call_here(path, driver)) is not None:
                link.close()
                return connection
            step("is connected to %s at %s, port %d", driver, address, port)
            return link
        if monotonic() >= deadline:
            raise ConnectionError("; ".join(errors.values()) or "no process listens there")
        time.sleep(_RETRY_INTERVAL)


def _call_here(path: str, driver: str) -> Connection | None:
    """Connect to the driver on this machine; return None if it does not listen there."""
    try:
        with unix_sockets.connect(path) as call:
            step("is connected to %s", driver)
            return Connection(call.detach())
    except PermissionError as error:
        raise RendezvousError(f"this process cannot connect to {driver} at {path}: {error.strerror}") from None
    except OSError:
        return None


def _resolved(address: str) -> str:
    """Return `address` and, for a name, the addresses that this machine finds, which may differ elsewhere."""
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(address, None)} - {address}
    except (OSError, ValueError) as error:
        return f"{address} ({error})"
    return f"{address} ({', '.join(sorted(found))})" if found else address


# The store of torchrun's agents


def _ask_store(where: Address, value: str, timeout: float) -> str:
    """Set the value in the agents' store to `value`; if `value` is empty, wait for a value and return it.

    A separate process does this: the protocol is torch's, and this process must not import torch.
    """
    assert where.key is not None
    command = python_command(_STORE, where.host, str(where.port), where.key, str(timeout), path=sys.path)
    done = subprocess.run(command, input=value, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RendezvousError(f"the store of torchrun's agents at {where.text} cannot be used: {last}")
    return done.stdout


def _read_store(where: Address, timeout: float) -> tuple[list[str], int, bytes]:
    """Wait until rank 0 has set the value in the agents' store; return its addresses, its port and the random secret.

    Raise :class:`RendezvousError` if the value is malformed: every process that reaches the store can set it.
    """
    try:
        value: _StoredValue = decode(_ask_store(where, "", timeout).encode(), _StoredValue)
        return value.addresses, value.port, bytes.fromhex(value.secret)
    except ValueError as error:
        raise RendezvousError(
            f"the store of torchrun's agents at {where.text} has no valid value of rank 0 at {where.key}: {error}"
        ) from None


def _addresses(where: Address) -> list[str]:
    """Return the addresses at which others may reach this machine; the address that reaches the store is first."""
    found = [address for _, address in own_interfaces()]
    with suppress(OSError), socket.create_connection((where.host, where.port), _PROBE_TIMEOUT) as probe:
        found.insert(0, str(probe.getsockname()[0]))
    return list(dict.fromkeys(found))


def own_interfaces() -> list[tuple[str, str]]:
    """Return the addresses at which other machines may reach this machine, each after the name of its interface."""
    entries = [(name, one) for name, interface in psutil.net_if_addrs().items() for one in interface]
    found = [(name, one.address) for name, one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
    return [(name, at) for name, at in found if not at.startswith(("127.", "fe80:")) and at != "::1"]
