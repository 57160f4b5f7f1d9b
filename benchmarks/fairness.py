"""Two sessions on one machine: the time to get devices that are idle in the other session, and each session's share."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.measure import PLUGINS, WITH, Effort, Figure, clean_environment
from pytest_accel.leases.locks import who_holds
from pytest_accel.leases.shared_folder import VARIABLE

DEVICES = 4
ROUNDS = 20
SECONDS = 20.0
"""Seconds for which both sessions wait for devices."""
_TIMEOUT = 600
_SAMPLE = 0.01
"""Seconds between two samples of the devices that each session holds."""

_TURNS = """
import os
import time
from pathlib import Path

FOLDER = Path("..")
ME = int(Path.cwd().name)


def note(what):
    with (FOLDER / "stamps").open("a") as file:
        file.write(f"{what} {ME} {time.monotonic()}\\n")


def wait_for(turn):
    while not (FOLDER / f"turn-{turn}").exists():
        time.sleep(0.002)
"""
_TURNS_TESTS = """
import time

import pytest
from conftest import FOLDER, ME, note, wait_for


def pytest_generate_tests(metafunc):
    metafunc.parametrize("turn", range({rounds}), scope="module")


def test_waits(turn):  # Meanwhile what this session has is idle.
    wait_for(2 * turn + ME)
    note("asks")  # The next test does, as soon as this one has ended.


@pytest.mark.devices({devices})
def test_takes(turn):
    note("has")
    time.sleep(0.2)


def test_passes_on(turn):
    time.sleep(0.1)
    (FOLDER / f"turn-{{2 * turn + ME + 1}}").touch()
"""
_BUSY = """
import time

import pytest


@pytest.mark.parametrize("number", range({tests}))
@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.devices(n)) for n in {sizes}])
def test_takes(number, devices):
    time.sleep({seconds})
"""


@dataclass(frozen=True, slots=True)
class BusySession:
    """A session that always has tests to run."""

    workers: int
    sizes: tuple[int, ...]
    """Numbers of devices of its tests."""
    seconds: float
    """Seconds of each test."""


CASES = {
    "equal sessions": (BusySession(8, (1, 2), 0.2), BusySession(8, (1, 2), 0.2)),
    "long tests against short ones": (BusySession(8, (1, 2), 0.6), BusySession(8, (1, 2), 0.15)),
    "four devices against single devices": (BusySession(8, (4,), 0.2), BusySession(8, (1,), 0.2)),
    "twelve workers against six": (BusySession(12, (1, 2), 0.2), BusySession(6, (1, 2), 0.2)),
}
"""The pairs of sessions. With two workers for each device, as documented, a session nearly always requests devices."""


def _start(folder: Path, locks: Path, arguments: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *PLUGINS, *WITH, *arguments]
    environment = clean_environment({VARIABLE: str(locks)})
    output = (folder / "output").open("wb")
    return subprocess.Popen([*command, "."], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _finish(sessions: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for the end of all sessions; raise RuntimeError with the output of one that failed."""
    try:
        failed = [number for number, session in enumerate(sessions) if session.wait(_TIMEOUT)]
    finally:
        for session in sessions:
            session.kill()
    if failed:
        raise RuntimeError((folder / str(failed[0]) / "output").read_text())


def waiting_times(folder: Path, rounds: int) -> list[float]:
    """Return the seconds from a test's start to its first line if the devices are idle in the other session's world."""
    sessions = []
    for number in range(2):
        own = folder / str(number)
        own.mkdir(parents=True)
        (own / "pytest.ini").write_text(f"[pytest]\naccel = sim:{DEVICES},shared\npythonpath = .\n")
        (own / "conftest.py").write_text(_TURNS)
        (own / "test_turns.py").write_text(_TURNS_TESTS.format(rounds=rounds, devices=DEVICES))
        sessions.append(_start(own, folder / "locks"))
    (folder / "turn-0").touch()
    _finish(sessions, folder)
    waits = []
    asked = 0.0
    for line in (folder / "stamps").read_text().splitlines():
        what, _, moment = line.split()
        if what == "asks":
            asked = float(moment)
        else:
            waits.append(float(moment) - asked)
    return waits[2:]  # Before the first two, no processes exist and no devices are idle.


def first_share(folder: Path, case: tuple[BusySession, BusySession], seconds: float) -> float:
    """Return the first session's share of the device-seconds while both sessions have tests to run."""
    sessions = []
    for number, one in enumerate(case):
        own = folder / str(number)
        own.mkdir(parents=True)
        (own / "pytest.ini").write_text(f"[pytest]\naccel = sim:{DEVICES},shared\n")
        tests = int(4 * DEVICES * seconds / one.seconds)
        (own / "test_busy.py").write_text(_BUSY.format(tests=tests, sizes=one.sizes, seconds=one.seconds))
        sessions.append(_start(own, folder / "locks", [f"-n{one.workers}"]))
    locks = folder / "locks"
    samples: Counter[int] = Counter()
    """By session: how many devices it held, summed over all samples."""
    first_held: dict[int, float] = {}
    """By session: when it first held a device."""
    session_of = {session.pid: session.pid for session in sessions}
    while len(first_held) < 2 or time.monotonic() < max(first_held.values()) + seconds:
        if any(session.poll() is not None for session in sessions):
            raise RuntimeError("a session ended before the end of the measurement: it had too few tests")
        for name in (f"sim-{number}" for number in range(DEVICES)):
            holder = who_holds(locks, name)
            if holder is not None and holder.pid:
                if holder.pid not in session_of:  # The pid of an xdist worker.
                    session_of[holder.pid] = psutil.Process(holder.pid).ppid()
                session = session_of[holder.pid]
                first_held.setdefault(session, time.monotonic())
                samples[session] += len(first_held) == 2
        time.sleep(_SAMPLE)
    for process in sessions:
        process.send_signal(signal.SIGINT)
    for process in sessions:
        process.wait(_TIMEOUT)
    return samples[sessions[0].pid] / samples.total()


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the waiting times, and the larger share of each pair of sessions."""
    full = effort.runs > 1
    waits = waiting_times(folder / "turns", ROUNDS if full else 3)
    name = f"time to get {DEVICES} devices idle in another session's world"
    found = [
        Figure(name, median(waits), "s", 1.0, "1 s", tuple(waits)),
        Figure("the longest of these times", max(waits), "s", 1.0, "1 s"),
    ]
    for name, case in CASES.items():
        share = first_share(folder / name.replace(" ", "-"), case, SECONDS if full else 4.0)
        note = f"the {'first' if share >= 0.5 else 'second'} session's"
        found.append(Figure(f"larger share, {name}", max(share, 1 - share), "", 0.55, "0.55", note=note))
    return found
