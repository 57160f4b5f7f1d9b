"""The rendezvous of a launcher's processes: at a Unix socket on one machine, and over the network on several.

The path of the Unix socket follows from user and job. On several machines rank 0 listens on a TCP port at the address
``MASTER_ADDR`` (`machine_link`): at ``MASTER_PORT``, or at a port that follows from the job if torchrun's agents have a
store at ``MASTER_PORT``. That store was rejected as a place for a random port and secret: everybody who reaches it can
read them, and each process would import torch to do so.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import queue
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from pytest_accel.core import processes, threads
from pytest_accel.core.clock import monotonic
from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.core.log import step
from pytest_accel.core.session_folder import TEMPORARY, ensure_own_folder, ensure_safe
from pytest_accel.core.truncation import ranks_text
from pytest_accel.features.launchers.agent_messages import End, Hello
from pytest_accel.leases.shared_folder import VARIABLE
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection

if TYPE_CHECKING:
    from pytest_accel.features.launchers.machine_link import AgentLink, DriverLink

SECRET_VARIABLE = "PYTEST_ACCEL_SECRET"
_HOW_TO_MAKE_ONE = f"export {SECRET_VARIABLE}=$(python3 -c 'import secrets; print(secrets.token_hex())')"
_SHORTEST = 16
"""Minimum number of characters: an attacker who reads the network can check guesses."""
TIMEOUT = 60.0
"""Seconds that a process waits for the others."""
_LONGEST = 1 << 24
"""Maximum size of a greeting, in bytes; command lines may be long."""
_GREETING_TIMEOUT = 5
"""Seconds that a process of this user may take to send its greeting, while the others wait."""
_PORTS = range(20_000, 30_000)
"""Rank 0 listens at a port of this range if torchrun's store listens at ``MASTER_PORT``.

Linux uses no port of this range for outgoing connections, unless it is told to (``ip_local_port_range``).
"""
_RETRY_INTERVAL = 0.05
"""Seconds between two attempts to connect to rank 0."""
DRIVER_LOST = 1
"""Exit status of a process whose driver has exited without sending `End`."""
EXIT_TIMEOUT = 30.0
"""Seconds that a driver may take to exit after it has sent `End`."""
_ALONE = "(with --accel-launcher off, each process runs all tests by itself)"
Caller = TypeVar("Caller")


class RendezvousError(Exception):
    """The processes did not find each other; the message says why, and names missing ranks."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which the processes of several machines meet."""

    host: str
    port: int
    key: bytes
    """The private key of the driver, from which its public key follows: only processes of the job have either."""


def find_address(environ: Mapping[str, str], process: LauncherEnv) -> Address | None:
    """Return the address that the launcher's and the user's variables describe; None if there is one machine only.

    torchrun's agents have a store at ``MASTER_PORT``, without authentication: whoever reaches it can make the processes
    join another job. So no secret is required there, and the key follows from the job alone.

    Raise :class:`RendezvousError` if a variable, the secret or pyzmq is missing.
    """
    if process.local_size == process.size:
        return None
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    secret = environ.get(SECRET_VARIABLE, "").strip()
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    needed = None
    if find_spec("zmq") is None:
        needed = "pyzmq, which is not installed there: pip install 'pytest-accel[cluster]'"
    elif not host or not port.isdecimal() or not 0 < int(port) <= 0xFFFF:
        needed = (
            f"an address to meet at (MASTER_ADDR={host!r}, MASTER_PORT={port!r}): export MASTER_ADDR, an address of "
            "rank 0's machine at which the others reach it, and MASTER_PORT, a free port there"
        )
    elif len(secret) < _SHORTEST and (secret or not has_store):
        needed = (
            f"a secret of at least {_SHORTEST} characters, by which they know each other: export {SECRET_VARIABLE} "
            f"with the same value to all of them: {_HOW_TO_MAKE_ONE}"
        )
    if needed is not None:
        raise RendezvousError(
            f"{process.launcher} has started {process.size} processes on several machines, and rank {process.rank} on "
            f"{platform.node()} needs {needed} {_ALONE}"
        )
    # JSON separates the values, so different jobs never have the same text.
    job = json.dumps(["pytest-accel", process.launcher, process.size, host, port, *process.job]).encode()
    key = hmac.digest(secret.encode(errors="surrogateescape"), job, "sha256")
    number = int.from_bytes(hashlib.sha256(job).digest(), "big")
    return Address(host, _PORTS[number % len(_PORTS)] if has_store else int(port), key)


def machine_identity() -> str:
    """Return a text that identifies this machine or container.

    Processes with the same identity see the same file systems, process ids and network (namespaces(7)). Addresses and
    host names do not tell: they may be equal on different machines.
    """
    found = [platform.node()]
    with suppress(OSError):
        found = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()]
        found += [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")]
    return " ".join(found)


def _gather(
    process: LauncherEnv, accept: Callable[[float], tuple[Caller, Hello] | None], timeout: float
) -> dict[int, tuple[Caller, Hello]]:
    """Wait for all other processes, in rank 0; return what `accept` returns for each, by rank.

    `accept` waits for a process for some seconds. Raise :class:`RendezvousError`, which names the missing ranks, after
    `timeout` seconds.
    """
    deadline = monotonic() + timeout
    found: dict[int, tuple[Caller, Hello]] = {}
    while absent := [rank for rank in range(1, process.size) if rank not in found]:
        met = accept(max(0.0, deadline - monotonic()))
        if met is not None:
            hello = met[1]
            found[hello.rank] = met  # A process whose first call took too long calls again.
            left = [rank for rank in absent if rank != hello.rank]
            more = f"; still waits for {ranks_text(left)}" if left else ""
            step("rank %d on %s has connected%s", hello.rank, hello.host, more)
        elif monotonic() >= deadline:
            raise RendezvousError(
                f"{process.launcher} has started {process.size} processes, and {ranks_text(absent)} did not "
                f"connect within {timeout:g} s: each process must run pytest with this plugin {_ALONE}"
            )
    return dict(sorted(found.items()))


# One machine


def rendezvous_path(process: LauncherEnv) -> str:
    """Return the path of rank 0's socket; it differs for sessions with different lock folders.

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
    return os.path.join(folder, f"{locks}-{process.key}.sock")


def gather(process: LauncherEnv, timeout: float = TIMEOUT) -> dict[int, tuple[Connection, Hello]]:
    """Wait for all other processes of this machine, in rank 0; return their connections and greetings.

    Raise :class:`RendezvousError`, which names the missing ranks, after `timeout` seconds.
    """
    path = rendezvous_path(process)
    try:
        unix_sockets.connect(path).close()
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(path)  # The socket of a process that was killed.
    else:
        raise RendezvousError(
            f"another session under {process.launcher} with the job {'/'.join(process.job)} is starting"
        )
    with unix_sockets.listen(path, process.size) as listener:
        try:
            step("listens at %s; waits for %s", path, ranks_text(range(1, process.size)))
            return _gather(process, partial(accept, listener), timeout)
        finally:
            os.unlink(path)


def accept(listener: socket.socket, timeout: float) -> tuple[Connection, Hello] | None:
    """Wait for a process of this user, and return its connection and its greeting.

    Return None if no process has connected within `timeout` seconds, or if it has sent something else.
    """
    if not unix_sockets.is_readable(listener.fileno(), timeout):
        return None
    listener.setblocking(False)  # The process may have closed its connection meanwhile.
    try:
        call = unix_sockets.accept(listener)
    except OSError:
        return None
    connection = Connection(call.detach())
    with unix_sockets.socket_of(connection) as end:
        try:
            unix_sockets.limit_reads(end, _GREETING_TIMEOUT)
            hello = decode(connection.recv_bytes(_LONGEST), Hello)
            unix_sockets.limit_reads(end, 0)
        except (EOFError, OSError, ValueError):
            return None
    return connection, hello


def join(process: LauncherEnv, own: Hello, timeout: float = TIMEOUT) -> Connection:
    """Connect this rank to rank 0 on the same machine, and greet it with `own`; return the connection.

    Raise :class:`RendezvousError` if rank 0 does not listen within `timeout` seconds.
    """
    path, deadline = rendezvous_path(process), monotonic() + timeout
    step("looks for rank 0 at %s", path)
    while True:
        try:
            connection = Connection(unix_sockets.connect(path).detach())
            connection.send_bytes(encode(own))
        except OSError as error:
            if monotonic() >= deadline:
                raise _unreachable(process, own, path, timeout, str(error)) from None
            time.sleep(_RETRY_INTERVAL)
        else:
            step("is connected to rank 0")
            return connection


def _unreachable(process: LauncherEnv, own: Hello, where: str, timeout: float, why: str) -> RendezvousError:
    return RendezvousError(
        f"{process.launcher} has started {process.size} processes, and rank {process.rank} on {own.host} did not "
        f"reach rank 0 at {where}, within {timeout:g} s: {why}"
    )


class WaitingProcess:
    """Rank 0's end of the connection to a waiting process."""

    machine_loss = None
    """Always None: the process is on this machine."""

    def __init__(self, connection: Connection, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called in a thread of this object when the connection has ended."""
        self.lost = False
        """True if the connection has ended."""
        self._connection = connection
        self._on_lost = on_lost
        threads.start(self._watch, "accel-launched")

    def _watch(self) -> None:
        with suppress(EOFError, OSError):
            self._connection.recv_bytes()
        self.lost = True
        self._on_lost()

    def end(self, status: int) -> None:
        """Have the process exit with `status`."""
        with suppress(OSError):  # It has ended.
            self._connection.send_bytes(encode(End(status, os.getpid())))


def wait_for_end(driver: Connection) -> int:
    """Wait until the driver has exited; return the exit status for this process."""
    ignore_interrupts()
    step("waits for the end of the session")
    try:
        end: End = decode(driver.recv_bytes(), End)
    except (EOFError, OSError):
        step("the connection to the driver has ended")
        return DRIVER_LOST
    step("the driver ends with status %d", end.status)
    # The driver exits first: a launcher that sees another exit status than 0 terminates all processes. Its connection
    # ends before the launcher can see its exit status.
    if (exit := processes.end_of(end.driver)) is not None:
        select.select([exit], [], [], EXIT_TIMEOUT)
        os.close(exit)
    return end.status


# Several machines


def gather_machines(
    process: LauncherEnv, where: Address, timeout: float = TIMEOUT
) -> tuple[dict[int, tuple[str, Hello]], DriverLink]:
    """Wait for all other processes, in rank 0; return their names in the link, with their greetings, and the link.

    Raise :class:`RendezvousError`, which names the missing ranks, after `timeout` seconds.
    """
    from pytest_accel.features.launchers.machine_link import DriverLink

    calls: queue.SimpleQueue[tuple[str, Hello]] = queue.SimpleQueue()
    try:
        link = DriverLink(where.key, where.port, lambda *call: calls.put(call))
    except OSError as error:
        raise RendezvousError(f"rank 0 cannot listen at port {where.port}: {error}; use another MASTER_PORT") from None

    def accept(seconds: float) -> tuple[str, Hello] | None:
        with suppress(queue.Empty):
            return calls.get(timeout=seconds)
        return None

    try:
        interfaces = ", ".join(map(" ".join, own_interfaces())) or "loopback only"
        step("listens on %s at port %d of all interfaces: %s", platform.node(), link.port, interfaces)
        step("waits for %s; MASTER_ADDR is %s", ranks_text(range(1, process.size)), where.host)
        return _gather(process, accept, timeout), link
    except BaseException:
        link.close()
        raise


def join_machines(process: LauncherEnv, own: Hello, where: Address, timeout: float = TIMEOUT) -> AgentLink:
    """Connect this rank to rank 0, and greet it with `own`; return the link.

    Raise :class:`RendezvousError` if it cannot be reached in `timeout` seconds.
    """
    from pytest_accel.features.launchers.machine_link import WrongSecret, call  # Imported here, since it needs pyzmq.

    step("looks for rank 0 at %s, port %d", where.host, where.port)
    try:
        return call([where.host], where.port, where.key, own, "rank 0", timeout)
    except WrongSecret:
        raise RendezvousError(
            f"the process that listens for rank 0 at {where.host}, port {where.port}, has another secret "
            f"({SECRET_VARIABLE}) than rank {process.rank} on {own.host}, or belongs to another job"
        ) from None
    except ConnectionError as error:
        raise _unreachable(process, own, f"{where.host}, port {where.port}", timeout, str(error)) from None


def own_interfaces() -> list[tuple[str, str]]:
    """Return the addresses at which other machines may reach this machine, each after the name of its interface."""
    entries = [(name, one) for name, interface in psutil.net_if_addrs().items() for one in interface]
    found = [(name, one.address) for name, one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
    return [(name, at) for name, at in found if not at.startswith(("127.", "fe80:")) and at != "::1"]


# The launched process itself


def ignore_interrupts() -> None:
    """Ignore Ctrl-C, which the driver handles. Ranks would inherit that a signal is ignored, but no handler."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)


def own_cores() -> tuple[int, ...]:
    """Return the CPU cores that the launcher lets this process use; empty if this is not known."""
    return tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else ()


def use_cores(cores: Collection[int]) -> None:
    """Use these CPU cores in this process and in its ranks; no-op if there are none.

    One process starts all ranks of a machine, and mpirun binds each process that it starts to a core of its own.
    """
    if sys.platform == "linux" and cores:
        with suppress(OSError):  # None of them is present, in a container.
            os.sched_setaffinity(0, cores)
