"""Tests of several processes that lease the same devices at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import psutil
import pytest

from pytest_accel.leases.broker import Broker
from pytest_accel.leases.device_locks import DeviceLocks
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.policy import Lease
from tests.leases.requests import submit

TIMEOUT = 60.0
ME = Holder.here("next")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts a Python program and waits for its first line; kill all programs at the end."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, arguments)]
        root = Path(__file__).parents[2]
        process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline(), "the program has exited before it was ready"
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def granted() -> Queue[Lease]:
    return Queue()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(("a", "b"), 0, DeviceLocks(tmp_path / "locks"), lambda _: None)
    yield made
    made.close()


CONTENDER = ("-m", "tests.leases.contender")
IDLE = ("-c", "print('ready', flush=True); input()")


def test_no_device_is_granted_to_two_sessions_at_once(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    rounds = 60
    contenders = [start(*CONTENDER, "contend", tmp_path / "locks", log, "a,b,c", rounds, seed) for seed in range(3)]
    for process in contenders:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in contenders:
        assert process.wait(TIMEOUT) == 0
    owner: dict[str, str | None] = dict.fromkeys("abc")
    leases = set()
    for line in log.read_text().splitlines():
        word, device, lease = line.split()
        if word == "got":
            assert owner[device] is None, f"{device} granted to {lease} while {owner[device]} has it"
            owner[device] = lease
            leases.add(lease)
        else:
            assert owner[device] == lease
            owner[device] = None
    assert set(owner.values()) == {None}
    assert len(leases) == 3 * rounds


def test_the_device_of_a_killed_session_is_granted_again(
    start: Start, tmp_path: Path, broker: Broker, granted: Queue[Lease]
) -> None:
    session = start(*CONTENDER, "hold", tmp_path / "locks", "a", 0, 0)
    submit(broker, ("a",), 1, granted.put)
    assert granted.empty()
    shown = DeviceLocks(tmp_path / "locks").holder("a")
    assert shown is not None
    assert (shown.pid, shown.test) == (session.pid, "killed")
    session.kill()
    assert granted.get(timeout=TIMEOUT).devices == ("a",)


def test_a_device_is_not_granted_while_a_process_of_the_killed_session_lives(
    start: Start, tmp_path: Path, broker: Broker, granted: Queue[Lease]
) -> None:
    rank = start(*IDLE)
    created = psutil.Process(rank.pid).create_time()
    session = start(*CONTENDER, "hold", tmp_path / "locks", "a", rank.pid, created)
    session.kill()
    session.wait(TIMEOUT)
    submit(broker, ("a",), 1, granted.put)
    others = DeviceLocks(tmp_path / "locks")
    assert not others.acquire("a", ME)
    assert granted.empty()
    rank.kill()
    assert granted.get(timeout=TIMEOUT).devices == ("a",)
