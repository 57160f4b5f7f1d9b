"""The start of an agent on a node of a Ray cluster, in a child process of the node's actor."""

from __future__ import annotations

import contextlib
import runpy
from pathlib import Path

from pytest_accel.core import prctl


def run(actor: int, raylet: int) -> None:
    """Run the agent in this process, a child of the process `actor`, whose parent is `raylet`."""
    prctl.die_with_parent(actor)
    # Ray has the kernel kill its workers first when memory runs out, and only a privileged user can undo that.
    with contextlib.suppress(PermissionError, FileNotFoundError):
        Path("/proc/self/oom_score_adj").write_text(
            Path(f"/proc/{raylet}/oom_score_adj").read_text(encoding="utf-8"), encoding="utf-8"
        )
    runpy.run_module("pytest_accel.features.ray.cluster_agent", run_name="__main__", alter_sys=True)
