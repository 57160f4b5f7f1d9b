"""Two machines on one: network namespaces that a pair of virtual interfaces joins, each with a host name of its own."""

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
"""time_namespaces(7)"""


class Machines:
    """Network namespaces that stand for machines."""

    def __init__(self, mark: str, folder: Path) -> None:
        self._hosts = folder / f"hosts-{mark}"
        known = zip(ADDRESSES, NAMES, strict=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in known)]
        self._hosts.write_text("\n".join([*lines, ""]))
        self.spaces = (f"accel-{mark}-a", f"accel-{mark}-b")
        self.links = (f"ac{mark}a", f"ac{mark}b")

    def on(self, machine: int, *, private: Sequence[str] = ()) -> tuple[str, ...]:
        """The beginning of a command that is to run there, with folders that it does not share with the other."""
        steps = [f"hostname {NAMES[machine]}", f"mount --bind {shlex.quote(str(self._hosts))} /etc/hosts"]
        steps += [f"mount -t tmpfs tmpfs {shlex.quote(folder)}" for folder in private]
        script = " && ".join([*steps, 'exec "$@"'])
        # The second has been up for much longer, by its clock.
        clock = ("--time", "--monotonic", "100000", "--fork") if machine and _CAN_SHIFT_CLOCKS else ()
        # Not `ip netns exec`, which takes the control groups out of sight.
        enter = ("nsenter", f"--net=/run/netns/{self.spaces[machine]}", "unshare", "--uts", "--mount", *clock)
        return (*enter, "sh", "-c", script, "sh")

    def remote_shell(self, path: Path) -> Path:
        """A program in the place of ssh: the host's name among its arguments says which machine the rest is run on."""
        cases = [f'{name}) shift; exec {shlex.join(self.on(at))} sh -c "$*";;' for at, name in enumerate(NAMES)]
        lines = ["#!/bin/sh", 'while [ $# -gt 0 ]; do case "$1" in', *cases, "*) shift;;", "esac; done", "exit 1", ""]
        path.write_text("\n".join(lines))
        path.chmod(0o700)
        return path

    def cut(self) -> None:
        """The link between them is down; nobody is told."""
        _ip("-n", self.spaces[1], "link", "set", self.links[1], "down")

    def pids(self) -> list[str]:
        """Processes that are still there."""
        return [pid for space in self.spaces for pid in _ip("netns", "pids", space).split()]


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """Skips where this user may not make any. `folder` is for what they need."""
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
