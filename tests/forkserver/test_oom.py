"""Tests of the detection of out-of-memory kills by the kernel's counter in control groups."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pytest_accel.forkserver.server import exit_of
from pytest_accel.hardware.kernel_files import oom_kills
from pytest_accel.messages.rank_messages import ExitCause, RankExit, exited

OOM_CONTROL_V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"
MEMORY_EVENTS_V2 = "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"


def write_machine(root: Path, groups: str, **files: str) -> Path:
    """Write ``/proc/self/cgroup`` (`groups`) and `files` of ``/sys/fs/cgroup`` below `root`, and return `root`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/user.slice/a\n", {"user.slice/a/memory.events": MEMORY_EVENTS_V2}, 3),
        ("0::/../other\n", {"memory.events": MEMORY_EVENTS_V2}, 3),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job/memory.oom_control": OOM_CONTROL_V1}, 7),
        ("4:memory:/of/the/host\n", {"memory/memory.oom_control": OOM_CONTROL_V1}, 7),
        ("4:memory:/job\n", {"memory/job/memory.oom_control": "under_oom 0\n"}, None),
        ("4:cpu:/job\n", {"memory/job/memory.oom_control": OOM_CONTROL_V1}, None),
    ],
)
def test_the_oom_kill_counter_of_the_kernel_is_read(
    tmp_path: Path, groups: str, files: dict[str, str], count: int | None
) -> None:
    assert oom_kills(write_machine(tmp_path, groups, **files)) == count


def test_there_is_no_counter_without_control_groups(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None


@pytest.mark.parametrize(
    ("status", "before", "after", "out_of_memory"),
    [
        (-signal.SIGKILL, 3, 4, True),
        (-signal.SIGKILL, 4, 4, False),
        (-signal.SIGKILL, None, 4, False),
        (-signal.SIGKILL, 3, None, False),
        (-signal.SIGTERM, 3, 4, False),
        (137, 3, 4, False),
    ],
)
def test_a_kill_is_out_of_memory_only_if_the_counter_has_risen(
    status: int, before: int | None, after: int | None, out_of_memory: bool
) -> None:
    expected = RankExit(ExitCause.OUT_OF_MEMORY, status) if out_of_memory else exited(status)
    assert exit_of(status, before, after) == expected
