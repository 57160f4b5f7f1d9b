"""Two sessions on one machine: time to get devices that are idle in the other, and the share of each in the devices."""

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
from pytest_accel.leases.device_lock import who_holds
from pytest_accel.leases.lock_dir import VARIABLE

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
_HUNGRY = """
import time

import pytest


@pytest.mark.parametrize("number", range({tests}))
@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.devices(n)) for n in {gangs}])
def test_takes(number, devices):
    time.sleep({seconds})
"""


@dataclass(frozen=True, slots=True)
class Hungry:
    """A session that always has something to run."""

    workers: int
    gangs: tuple[int, ...]
    seconds: float
    """Seconds of each test."""


CASES = {
    "alike": (Hungry(8, (1, 2), 0.2), Hungry(8, (1, 2), 0.2)),
    "long tests against short ones": (Hungry(8, (1, 2), 0.6), Hungry(8, (1, 2), 0.15)),
    "gangs against single devices": (Hungry(8, (4,), 0.2), Hungry(8, (1,), 0.2)),
    "twelve workers against six": (Hungry(12, (1, 2), 0.2), Hungry(6, (1, 2), 0.2)),
}
"""Two for each device, as the documentation advises: a session asks for devices at nearly every moment."""


def _start(folder: Path, locks: Path, arguments: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *PLUGINS, *WITH, *arguments]
    environment = clean_environment({VARIABLE: str(locks)})
    output = (folder / "output").open("wb")
    return subprocess.Popen([*command, "."], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _finish(sessions: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for all; raise RuntimeError if one fails."""
    try:
        failed = [number for number, session in enumerate(sessions) if session.wait(_TIMEOUT)]
    finally:
        for session in sessions:
            session.kill()
    if failed:
        raise RuntimeError((folder / str(failed[0]) / "output").read_text())


def turns(folder: Path, rounds: int) -> list[float]:
    """Return the seconds from a test's start to its first line while the other session's world has all devices idle."""
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
    return waits[2:]  # At first there are no processes, and nothing is idle elsewhere.


def share(folder: Path, case: tuple[Hungry, Hungry], seconds: float) -> float:
    """Return the first session's part of the device-seconds while both sessions have something to run."""
    sessions = []
    for number, one in enumerate(case):
        own = folder / str(number)
        own.mkdir(parents=True)
        (own / "pytest.ini").write_text(f"[pytest]\naccel = sim:{DEVICES},shared\n")
        tests = int(4 * DEVICES * seconds / one.seconds)
        (own / "test_hungry.py").write_text(_HUNGRY.format(tests=tests, gangs=one.gangs, seconds=one.seconds))
        sessions.append(_start(own, folder / "locks", [f"-n{one.workers}"]))
    locks = folder / "locks"
    had: Counter[int] = Counter()
    began: dict[int, float] = {}
    session_of = {session.pid: session.pid for session in sessions}
    while len(began) < 2 or time.monotonic() < max(began.values()) + seconds:
        if any(session.poll() is not None for session in sessions):
            raise RuntimeError("a session has ended: it had too few tests to be hungry for so long")
        for name in (f"sim-{number}" for number in range(DEVICES)):
            holder = who_holds(locks, name)
            if holder is not None and holder.pid:
                if holder.pid not in session_of:  # A worker of xdist.
                    session_of[holder.pid] = psutil.Process(holder.pid).ppid()
                session = session_of[holder.pid]
                began.setdefault(session, time.monotonic())
                had[session] += len(began) == 2
        time.sleep(_SAMPLE)
    for process in sessions:
        process.send_signal(signal.SIGINT)
    for process in sessions:
        process.wait(_TIMEOUT)
    return had[sessions[0].pid] / had.total()


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return seconds, and parts of all device-seconds."""
    full = effort.runs > 1
    waits = turns(folder / "turns", ROUNDS if full else 3)
    name = f"{DEVICES} devices idle in another session's world: until a test has them"
    found = [
        Figure(name, median(waits), "s", 1.0, "1 s", tuple(waits)),
        Figure("the slowest of them", max(waits), "s", 1.0, "1 s"),
    ]
    for about, case in CASES.items():
        part = share(folder / about.replace(" ", "-"), case, SECONDS if full else 4.0)
        note = f"the {'first' if part >= 0.5 else 'second'} one's"
        found.append(
            Figure(f"both hungry, {about}: the larger share", max(part, 1 - part), "", 0.55, "0.55", note=note)
        )
    return found
