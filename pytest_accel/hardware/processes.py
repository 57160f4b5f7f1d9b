"""Attribution of the processes that use a device, as reported by its driver, to this session or to others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from pytest_accel.hardware.health import Facts, Health, judge

USED_BY_SUITE = "in which code of the suite has used the device"
"""The summary says this of a process of this session that uses a device and is no rank."""


def judge_all(facts: Mapping[str, Facts], session: int | None) -> dict[str, Health]:
    """Return the health of each device, by its id, from its `facts`.

    `session` is a pid (None: this process). It and its descendants do not count as users of a device.
    """
    own: dict[int, str] = {}
    names: dict[int, str] = {}
    pids = {process.pid for one in facts.values() for process in one.processes}
    if pids:
        # Imported here, since it takes some 10 ms and is needed only if a device is in use.
        import psutil

        main = os.getpid() if session is None else session
        for pid in pids:
            # Processes that are not visible, as outside of a container, are in neither.
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                names[pid] = process.name()
                parents = [parent.pid for parent in process.parents()]
                if pid == main:
                    own[pid] = f"this session's main process, {USED_BY_SUITE}"
                elif main in parents:
                    # The main process is the parent of xdist's workers. The parent of a rank is a fork server.
                    own[pid] = f"this session's, {USED_BY_SUITE}" if parents[0] == main else ""
    return {name: judge(one, own, names) for name, one in facts.items()}
