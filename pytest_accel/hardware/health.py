"""Whether a device can be used: what its driver tells of it, judged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from pytest_accel.core.device import Device
from pytest_accel.core.units import format_memory

_NOBODYS = 2 * 1024**3
"""Bytes that a driver (some 600 MiB) and a desktop may use of a device on which nothing computes."""
ComputeMode = Literal["default", "exclusive_process", "prohibited"]


@dataclass(frozen=True, slots=True)
class Process:
    """A process that has a compute context on a device."""

    pid: int
    used: int | None = None
    """Bytes of the device's memory; None where the driver does not tell."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a driver tells of a device; what it does not tell speaks neither for the device nor against it."""

    processes: tuple[Process, ...] = ()
    ecc_errors: int = 0
    """Uncorrectable memory errors since the driver was loaded."""
    retirement_pending: bool = False
    """Whether a broken memory page stays in use until the driver is loaded anew."""
    remap_failed: bool = False
    """Whether a broken row of memory could not be replaced, ever."""
    compute_mode: ComputeMode = "default"
    lost: bool = False
    """Whether the driver cannot reach it any more."""
    memory_used: int | None = None
    """Bytes in use, whoever uses them and the driver's own included."""
    memory_free: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """A sick device is never handed out; a busy one is used by processes that are none of this session's."""

    state: Literal["fine", "busy", "sick"] = "fine"
    reason: str = ""
    """In words, to follow the device's name: ``is used by pid 71 (python3, 2 GiB)``."""
    memory_free: int | None = None
    """Bytes that are free now."""
    unseen: bool = False
    """Whether it is busy by memory in use alone, which no process is told to have."""


@runtime_checkable
class HealthVendor(Protocol):
    """What a :class:`~pytest_accel.core.device.Vendor` may have besides, if its driver tells who uses a device."""

    def health(self, devices: Sequence[Device], session: int | None = None) -> Mapping[str, Health]:
        """The health of each of `devices`, now, by its id.

        `session` is the pid of the session's main process (None: this one): it and what descends from it make no
        device busy.
        """
        ...


def judge(facts: Facts, own: Collection[int] = (), names: Mapping[int, str] | None = None) -> Health:
    """Sick comes before busy. `own` are pids that make no device busy; `names` are those of processes, by pid.

    Where no process is told of (in a container the driver may hide them), much memory in use makes a device busy too.
    """
    sickness = _sickness(facts)
    if sickness:
        return Health("sick", sickness, facts.memory_free)
    others = [process for process in facts.processes if process.pid not in own]
    if others:
        reason = "is used by " + ", ".join(_holder(process, names or {}) for process in others)
    elif not facts.processes and (facts.memory_used or 0) > _NOBODYS:
        reason = (
            f"has {format_memory(facts.memory_used or 0)} of its memory in use, by nobody who can be seen from here"
        )
    else:
        return Health(memory_free=facts.memory_free)
    return Health("busy", reason, facts.memory_free, unseen=not others)


def _sickness(facts: Facts) -> str:
    if facts.lost:
        return "its driver cannot reach it any more"
    if facts.compute_mode == "prohibited":
        return "its compute mode is PROHIBITED"
    if facts.remap_failed:
        return "it has failed to replace a broken row of its memory"
    if facts.retirement_pending:
        return "it has broken memory pages that stay in use until the driver is loaded anew"
    if facts.ecc_errors:
        several = f"{facts.ecc_errors} uncorrectable memory errors"
        errors = "an uncorrectable memory error" if facts.ecc_errors == 1 else several
        return f"it has had {errors} (ECC) since its driver was loaded"
    return ""


def _holder(process: Process, names: Mapping[int, str]) -> str:
    name = names.get(process.pid)
    told = [name or "not to be seen from here"]
    if process.used is not None:
        told.append(format_memory(process.used))
    return f"pid {process.pid} ({', '.join(told)})"
