"""The doctor's facts about launchers, and about the network over which the processes of a launcher join.

Nothing is sent. A port is opened for a moment, and a connection to `MASTER_ADDR` is closed at once.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata

import psutil

from pytest_accel.core import launcher_env, threads
from pytest_accel.core.interpreter import find_program
from pytest_accel.core.launcher_env import LauncherEnv

_TIMEOUT = 3.0
"""Seconds that a name server, and the process at `MASTER_ADDR`, may take to answer."""
_PACKAGES = {"torchrun": "torch", "accelerate": "accelerate", "deepspeed": "deepspeed", "ray": "ray"}
"""The launchers that are Python packages."""
_ELSEWHERE = "198.51.100.1"
"""An address of no machine (RFC 5737). The route to it is that to other machines."""


@dataclass(frozen=True, slots=True)
class LauncherFacts:
    """The launchers that this process's environment shows, and those that are installed."""

    launchers: tuple[LauncherEnv, ...] = ()
    """The launchers that have started this process. The first is the innermost, by which a session goes."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables of launchers that are set."""
    incomplete: tuple[str, tuple[str, ...]] | None = None
    """A launcher that has set some of its variables, and the names of the others."""
    installed: Mapping[str, str | None] = field(default_factory=dict)
    """By launcher, its version or program; None if it is not installed."""

    @property
    def joins_machines(self) -> bool:
        """True if processes have to join over the network."""
        return bool(self.launchers) and self.launchers[0].local_size < self.launchers[0].size


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The addresses of this machine, and of the place where the processes of a launcher meet."""

    name: str
    """The host name."""
    named: tuple[str, ...] = ()
    """The addresses of the host name, as this machine knows them."""
    address: str = ""
    """The address of this machine from which it reaches others; empty if it has only loopback."""
    interface: str = ""
    """The network interface of `address`."""
    no_port: str | None = None
    """Why this machine cannot listen on a port; None if it can."""
    master: tuple[str, str] = ("", "")
    """`MASTER_ADDR` and `MASTER_PORT`; empty if they are not set."""
    meeting: tuple[str, ...] = ()
    """The addresses of `MASTER_ADDR`, as this machine knows them."""
    here: bool = False
    """True if `MASTER_ADDR` is this machine."""
    answer: str = ""
    """``answers``, ``refused``, or why `MASTER_ADDR` cannot be reached; empty if it has no address or no valid port."""


def look_at_launch() -> LauncherFacts:
    """Return the facts about launchers."""
    installed: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for launcher, package in _PACKAGES.items():
        with suppress(metadata.PackageNotFoundError):
            installed[launcher] = metadata.version(package)
    for launcher in ("mpirun", "srun"):
        program = find_program(launcher)
        # The target of a link shows which MPI it is.
        installed[launcher] = os.path.realpath(program) if program else None
    return LauncherFacts(
        tuple(launcher_env.recognized(os.environ)),
        launcher_env.variables_here(os.environ),
        launcher_env.incomplete(os.environ),
        installed,
    )


def look_at_network() -> NetworkFacts:
    """Return the facts about the network. It takes seconds if nothing answers."""
    interfaces = {one.address: name for name, entries in psutil.net_if_addrs().items() for one in entries}
    name, master, port = platform.node(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    meeting = _look_up(master) if master else ()
    here = any(is_loopback(one) or one in interfaces for one in meeting)
    valid = port.isdecimal() and 0 < int(port) < 1 << 16
    answer = _call(meeting, int(port)) if meeting and valid else ""
    given = [one for one in meeting if here and not is_loopback(one)]
    address = given[0] if given else _own_address(_ELSEWHERE if here or not meeting else meeting[0], interfaces)
    no_port = _try_port(int(port) if here and answer == "refused" else 0)
    return NetworkFacts(
        name, _look_up(name), address, interfaces.get(address, ""), no_port, (master, port), meeting, here, answer
    )


def is_loopback(address: str) -> bool:
    """Return whether `address` reaches only this machine."""
    return address.startswith("127.") or address == "::1"


def _look_up(name: str) -> tuple[str, ...]:
    """Return the addresses of `name`; none if it is unknown, or if the name server does not answer in time."""
    found: list[str] = []

    def look() -> None:
        with suppress(OSError, ValueError):
            found.extend(str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))

    threads.start(look, "accel-look-up").join(_TIMEOUT)
    return tuple(dict.fromkeys(found))


def _own_address(target: str, interfaces: Mapping[str, str]) -> str:
    """Return the address of this machine on the route to `target`; without a route, another one; without any, ""."""
    own, family = "", socket.AF_INET6 if ":" in target else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # UDP sends nothing here.
        own = str(probe.getsockname()[0])
    others = (address for address in interfaces if address.count(".") == 3 and not is_loopback(address))
    return own if own and not is_loopback(own) else next(others, "")


def _try_port(port: int) -> str | None:
    """Return why this machine cannot listen on `port`, or on any if that is 0; None if it can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


def _call(addresses: Sequence[str], port: int) -> str:
    """Return `NetworkFacts.answer` for `port` of a machine with these `addresses`. A session tries them all, too."""
    answer = ""
    for address in addresses:
        try:
            socket.create_connection((address, port), _TIMEOUT).close()
        except OSError as error:
            if answer != "refused":
                answer = "refused" if error.errno == errno.ECONNREFUSED else error.strerror or str(error)
        else:
            return "answers"
    return answer
