"""The health of a device, judged from what its driver reports."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, runtime_checkable

from pytest_accel.core.device import Device
from pytest_accel.core.units import format_memory

IDLE_MEMORY = 2 * 1024**3
"""Bytes that the driver (some 600 MiB) and a desktop may use on an otherwise idle device."""
ComputeMode = Literal["default", "exclusive_process", "prohibited"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a device that its driver reports. A missing fact counts as normal."""

    processes: Mapping[int, int | None] = field(default_factory=dict)
    """The processes that have a compute context on the device, by pid, with the bytes of its memory that each uses.

    None if the driver does not report the bytes.
    """
    ecc_errors: int = 0
    """Uncorrectable memory errors since the driver was loaded."""
    retirement_pending: bool = False
    """True if a defective memory page stays in use until the driver is reloaded."""
    remap_failed: bool = False
    """True if a defective memory row could not be remapped."""
    compute_mode: ComputeMode = "default"
    lost: bool = False
    """True if the driver cannot reach the device any more."""
    memory_used: int | None = None
    """Bytes in use by any process or by the driver itself."""
    memory_free: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """State of a device: a sick device is never leased; a busy device is used by processes outside this session."""

    state: Literal["fine", "busy", "sick"] = "fine"
    reason: str = ""
    """Text that follows the device's name: ``is used by pid 71 (python3, 2 GiB)``."""
    memory_free: int | None = None
    """Bytes that are free now."""
    pids: frozenset[int] = frozenset()
    """The processes that the driver lists, of this session and of others."""
    sees_users: bool = False
    """True if the driver lists processes, and all of them can be seen here. In a container they often cannot."""


@runtime_checkable
class HealthVendor(Protocol):
    """Additional method of a :class:`~pytest_accel.core.device.Vendor` whose driver reports the users of a device.

    ``accel_busy`` uses it, and so does the pool, to wait until the memory of a device is free again.
    """

    def health(self, devices: Sequence[Device], session: int | None = None) -> Mapping[str, Health]:
        """Return the current health of each of `devices`, by its id.

        `session` is the pid of the session's main process (this one if None). It and its descendants do not make a
        device busy.
        """
        ...


def judge(facts: Facts, own: Collection[int] = (), names: Mapping[int, str] = MappingProxyType({})) -> Health:
    """Return the health of a device with these `facts`: sick, else busy, else fine.

    `own` are the pids of the session's processes, which do not make a device busy. `names` has the names of the
    processes that can be seen here, by pid.
    """
    sickness = _sickness(facts)
    if sickness:
        return Health("sick", sickness, facts.memory_free)
    others = {pid: used for pid, used in facts.processes.items() if pid not in own}
    reason = ""
    if others:
        reason = "is used by " + ", ".join(_holder(pid, used, names) for pid, used in others.items())
    # In a container the driver may hide processes, so much used memory without any process makes a device busy, too.
    elif not facts.processes and (facts.memory_used or 0) > IDLE_MEMORY:
        used = format_memory(facts.memory_used or 0)
        reason = f"has {used} of its memory in use, but no process on it is visible from here"
    pids = frozenset(facts.processes)
    sees_users = bool(pids) and pids <= names.keys()
    return Health("busy" if reason else "fine", reason, facts.memory_free, pids, sees_users)


def judge_all(facts: Mapping[str, Facts], session: int | None) -> dict[str, Health]:
    """Return the health of each device, by its id, from its `facts`.

    `session` is a pid (this process's if None). It and its descendants do not count as users of a device.
    """
    own: set[int] = set()
    names: dict[int, str] = {}
    pids = {pid for one in facts.values() for pid in one.processes}
    if pids:
        # Imported here, since it takes some 10 ms and is needed only if a device is in use.
        import psutil

        main = os.getpid() if session is None else session
        for pid in pids:
            # A process that is not visible here, such as one outside of the container, is in neither.
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                names[pid] = process.name()
                if main in (pid, *(parent.pid for parent in process.parents())):
                    own.add(pid)
    return {name: judge(one, own, names) for name, one in facts.items()}


def _sickness(facts: Facts) -> str:
    if facts.lost:
        return "its driver cannot reach it any more"
    if facts.compute_mode == "prohibited":
        return "its compute mode is PROHIBITED"
    if facts.remap_failed:
        return "it has failed to replace a broken row of its memory"
    if facts.retirement_pending:
        return "it has broken memory pages that stay in use until the driver is reloaded"
    if facts.ecc_errors:
        several = f"{facts.ecc_errors} uncorrectable memory errors"
        errors = "an uncorrectable memory error" if facts.ecc_errors == 1 else several
        return f"it has had {errors} (ECC) since its driver was loaded"
    return ""


def _holder(pid: int, used: int | None, names: Mapping[int, str]) -> str:
    details = [names.get(pid) or "not visible from here"]
    if used is not None:
        details.append(format_memory(used))
    return f"pid {pid} ({', '.join(details)})"
