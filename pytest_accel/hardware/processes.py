"""Attribution of the processes that use a device, as reported by its driver, to this session or to others."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from pytest_accel.hardware.health import Facts, Health, judge


def judge_all(facts: Mapping[str, Facts], session: int | None) -> dict[str, Health]:
    """Return the health of each device, by its id, from its `facts`.

    `session` is a pid (None: this process). It and its descendants do not count as users of a device.
    """
    pids = {process.pid for one in facts.values() for process in one.processes}
    own, names = own_and_names(pids, session)
    return {name: judge(one, own, names) for name, one in facts.items()}


def own_and_names(pids: Collection[int], session: int | None) -> tuple[set[int], dict[int, str]]:
    """Return those of `pids` that are `session` (None: this process) or its descendants, and names by pid.

    Processes that are not visible, as outside of a container, are in neither.
    """
    if not pids:
        return set(), {}
    # Imported here, since it takes some 10 ms and is needed only if a device is in use.
    import psutil

    main = os.getpid() if session is None else session
    own: set[int] = set()
    names: dict[int, str] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            names[pid] = process.name()
            if pid == main or any(parent.pid == main for parent in process.parents()):
                own.add(pid)
        except psutil.Error:
            continue
    return own, names
