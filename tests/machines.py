"""Two simulated machines: network namespaces with different host names, joined by a pair of virtual interfaces."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("near-node", "far-node")

_CAN_SHIFT_CLOCKS = Path("/proc/self/ns/time").exists()
"""True if the kernel has time_namespaces(7)."""


class Machines:
    """Two network namespaces that simulate machines. `machines` makes and deletes them."""

    def __init__(self, tag: str, folder: Path) -> None:
        self.folder = folder
        self._hosts = folder / f"hosts-{tag}"
        hosts = zip(ADDRESSES, NAMES, strict=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in hosts)]
        self._hosts.write_text("\n".join([*lines, ""]))
        self.spaces = (f"accel-{tag}-a", f"accel-{tag}-b")
        self.links = (f"ac{tag}a", f"ac{tag}b")

    def on(self, machine: int, *, private: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the prefix of a command that runs on `machine`.

        The machine does not share the folders `private` with the other one.
        """
        steps = [f"hostname {NAMES[machine]}", f"mount --bind {shlex.quote(str(self._hosts))} /etc/hosts"]
        steps += [f"mount -t tmpfs tmpfs {shlex.quote(folder)}" for folder in private]
        script = " && ".join([*steps, 'exec "$@"'])
        # The monotonic clock of the second machine is far ahead, as if it had been up for longer.
        clock = ("--time", "--monotonic", "100000", "--fork") if machine and _CAN_SHIFT_CLOCKS else ()
        # `ip netns exec` would hide the control groups.
        enter = ("nsenter", f"--net=/run/netns/{self.spaces[machine]}", "unshare", "--uts", "--mount", *clock)
        return (*enter, "sh", "-c", script, "sh")

    def remote_shell(self, path: Path) -> Path:
        """Write a replacement of ssh to `path`, and return `path`.

        The program runs the arguments after the host name on the machine with this name.
        """
        cases = [f'{name}) shift; exec {shlex.join(self.on(at))} sh -c "$*";;' for at, name in enumerate(NAMES)]
        lines = ["#!/bin/sh", 'while [ $# -gt 0 ]; do case "$1" in', *cases, "*) shift;;", "esac; done", "exit 1", ""]
        path.write_text("\n".join(lines))
        path.chmod(0o700)
        return path

    def add_unreachable_address(self, address: str) -> None:
        """Give the first machine another address, to which the second one has no route until :meth:`add_route`."""
        _ip("-n", self.spaces[0], "address", "add", f"{address}/32", "dev", "lo")

    def add_route(self, address: str) -> None:
        """Let the second machine reach `address` of the first one."""
        _ip("-n", self.spaces[1], "route", "add", address, "via", ADDRESSES[0])

    def cut(self) -> None:
        """Set the link between the machines down. Programs are not notified."""
        _ip("-n", self.spaces[1], "link", "set", self.links[1], "down")

    def pids(self) -> list[str]:
        """Return the ids of the processes that run on the machines."""
        return [pid for space in self.spaces for pid in _ip("netns", "pids", space).split()]


def _ip(*words: str) -> str:
    result = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(f"ip {' '.join(words)}: {result.stderr.strip()}")
    return result.stdout


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """Yield two machines whose files are in `folder`; skip the test if they cannot be made."""
    if os.name != "posix" or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    made = Machines(uuid.uuid4().hex[:6], folder)
    try:
        try:
            for space in made.spaces:
                _ip("netns", "add", space)
                _ip("-n", space, "link", "set", "lo", "up")
            _ip("link", "add", made.links[0], "type", "veth", "peer", "name", made.links[1])
            for space, link, address in zip(made.spaces, made.links, ADDRESSES, strict=True):
                _ip("link", "set", link, "netns", space)
                _ip("-n", space, "address", "add", f"{address}/30", "dev", link)
                _ip("-n", space, "link", "set", link, "up")
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield made
    finally:
        for space in made.spaces:
            with suppress(OSError):
                _ip("netns", "delete", space)
