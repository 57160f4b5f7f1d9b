"""Test of several processes that lease the same devices at the same time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from tests.deadline import scaled

ROUNDS = 60
"""Number of leases of each process."""


def test_no_device_is_granted_to_two_sessions_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-m", "tests.leases.contender", str(tmp_path / "locks"), str(log), "a,b,c", str(ROUNDS)]
    with contextlib.ExitStack() as stack:
        contenders = []
        for seed in range(3):
            process = subprocess.Popen(
                [*command, str(seed)], cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            contenders.append(process)
        for process in contenders:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for process in contenders:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        for process in contenders:
            assert process.wait(scaled(60)) == 0
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
    assert len(leases) == 3 * ROUNDS
