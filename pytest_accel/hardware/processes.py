"""Whose the processes are that a driver says use a device."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from pytest_accel.hardware.health import Facts, Health, judge


def judge_all(facts: Mapping[str, Facts], session: int | None) -> dict[str, Health]:
    """The health of each device, by its id; `session` (None: this process) and what descends from it are no users."""
    pids = {process.pid for one in facts.values() for process in one.processes}
    own, names = own_and_names(pids, session)
    return {name: judge(one, own, names) for name, one in facts.items()}


def own_and_names(pids: Collection[int], session: int | None) -> tuple[set[int], dict[int, str]]:
    """Which of `pids` are `session` (None: this process) or descend from it, and the names of all that can be seen."""
    if not pids:
        return set(), {}
    # Loading it costs some 10 ms, which a machine whose devices nobody uses need not pay.
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
