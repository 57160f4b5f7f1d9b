"""The checks of the doctor: each looks at a part of this machine, and yields its results.

They import no torch, initialize no device runtime and write nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from pytest_accel.core import launcher_env
from pytest_accel.core.kinds import kinds
from pytest_accel.hardware.inventory import Inventory, Machine, grouped
from pytest_accel.hardware.kernel_files import read_text
from pytest_accel.hardware.queries import versions
from pytest_accel.hardware.registry import VendorError
from pytest_accel.hardware.vendors.nvml import driver_installed, optional
from pytest_accel.leases.shared_folder import default_folder, folder_problem
from pytest_accel.settings.options import Settings, machine_for

_GET_TORCH = "https://pytorch.org/get-started/locally/ lists the builds of torch"

State = Literal["ok", "note", "problem"]
_Result = tuple[State, str, str]
"""State, text and advice of a finding."""


class Finding(NamedTuple):
    """A result of a check."""

    check: str
    state: State
    """`problem`: tests fail, hang or skip because of it. `note`: may be worth knowing."""
    what: str
    """The finding, in one sentence."""
    advice: str = ""
    """Advice to the user; empty if nothing needs to be done."""


class _Subject(NamedTuple):
    """The machine as the session of the settings sees it."""

    settings: Settings
    machine: Machine
    kinds: Mapping[str, Inventory]
    """The devices of each kind that can be used."""
    broken: Sequence[str]
    """Why the other kinds cannot be used."""

    @property
    def accel(self) -> str:
        """The name in ``--accel``: ``auto``, ``none`` or a kind."""
        return self.settings.accel.strip().partition(":")[0]

    def weight(self, kind: str) -> State:
        """Return the state of a finding about `kind`: a note if the session does not use this kind, else a problem."""
        return "problem" if self.accel in ("auto", kind) else "note"


def check(settings: Settings) -> list[Finding]:
    """Return the findings of all checks in their order; each check has at least one.

    Raise ValueError if a setting does not fit the machine.
    """
    machine = machine_for(settings)
    found: dict[str, Inventory] = {}
    broken: dict[str, None] = {}  # If the kind of the session is broken, each kind has its error.
    for kind in kinds():
        try:
            found[kind] = machine.of(kind)
        except VendorError as error:
            broken[str(error)] = None
    subject = _Subject(settings, machine, found, list(broken))
    return [Finding(name, *result) for name, look in _CHECKS.items() for result in look(subject)]


def _devices(subject: _Subject) -> Iterator[_Result]:
    session = subject.machine.session if subject.kinds else None
    if session is not None and session.devices:
        yield "ok", f"the session has {session.kind}: {grouped(session.devices)}", ""
    elif session is not None and session.kind == "none":
        yield "ok", "the session has no accelerator: ranks run on the CPU", ""
    elif session is not None:
        state: State = "note" if session.present else "problem"
        what = f"the session has no {session.kind} device, and the machine {session.present}"
        yield state, what, "Tests that need one skip. Name a kind that is present, or auto; see also the masks."
    driver = _nvidia_driver()
    if isinstance(driver, str):
        advice = "See what nvidia-smi says. After an update of the driver, restart the machine; or the container, with "
        yield subject.weight("cuda"), f"the NVIDIA driver does not answer: {driver}", f"{advice}its GPUs."
    elif driver is None and (cards := _nvidia_cards(Path("/"))):
        advice = "Install NVIDIA's driver; a container needs to be started with its GPUs (docker run --gpus all)."
        what = f"NVIDIA GPUs on the PCI bus: {cards}, but the driver's libnvidia-ml.so.1 cannot be loaded"
        yield subject.weight("cuda"), what, advice
    for error in subject.broken:
        advice = "Name another kind with --accel. If a package publishes this one, update or uninstall it."
        yield "problem" if session is None or subject.accel == "auto" else "note", error, advice


def _nvidia_driver() -> int | str | None:
    """Return the newest CUDA of NVIDIA's driver, 12040 for 12.4, or why it does not answer; None without a driver."""
    if not driver_installed():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    try:
        return optional(pynvml, pynvml.nvmlSystemGetCudaDriverVersion_v2) or 0
    finally:
        pynvml.nvmlShutdown()


def _nvidia_cards(root: Path) -> int:
    """Return the number of NVIDIA GPUs that sysfs, below `root`, shows on the PCI bus."""
    # 0x03 is the base class of display controllers. GPUs without a display output are in it too (0x0302).
    return sum(
        read_text(device / "vendor") == "0x10de" and read_text(device / "class").startswith("0x03")
        for device in (root / "sys/bus/pci/devices").glob("*")
    )


def _torch(subject: _Subject) -> Iterator[_Result]:
    builds, driver = versions(), _nvidia_driver()
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        what = "torch is not installed: distributed tests need init=False, and cannot use the fixtures of torch"
        yield "note", what, f"Install one that fits the hardware: {_GET_TORCH}."
        return
    built = f"torch {torch}, built for {' and '.join(map(' '.join, builds.items())) or 'the CPU alone'}"
    found: list[_Result] = []
    for kind, one in subject.kinds.items():
        lacking = subject.machine.vendor(kind).lacking()
        if kind == "cuda" and kind not in builds:  # A session has them nevertheless: not all tests use torch.
            lacking = "torch is not built for CUDA"
        if one.present and lacking is not None:
            # With `auto`, the session ignores other such kinds, which may be chips in the processor.
            state = subject.weight(kind) if kind in ("cuda", subject.accel) else "note"
            what = f"{grouped(one.devices) or one.present} ({kind}) cannot be used: {lacking} ({built})"
            # pip keeps a torch of the same version that is built for the CPU.
            advice = f"Install what is missing, a torch with pip install --force-reinstall: {_GET_TORCH}."
            found.append((state, what, advice))
    # A driver supports all CUDA releases of its major version (NVIDIA, "CUDA Compatibility", minor versions).
    if isinstance(driver, int) and 0 < driver // 1000 < int(builds.get("cuda", "0").partition(".")[0]):
        what = f"{built}, and the driver supports CUDA {driver // 1000}.{driver % 1000 // 10} at most"
        advice = f"Update the driver, or install a torch that is built for CUDA {driver // 1000}: {_GET_TORCH}."
        found.append((subject.weight("cuda"), what, advice))
    yield from found or [("ok", built, "")]


def _masks(subject: _Subject) -> Iterator[_Result]:
    hidden = {kind: one for kind, one in subject.kinds.items() if one.inherited and one.present and not one.visible}
    for kind, one in hidden.items():
        advice = f"Unset {' and '.join(one.inherited)}, or name devices that are present. To run without devices, use "
        what = f"{_assignments(one.inherited)} leaves none of {one.present} ({kind})"
        yield subject.weight(kind), what, f"{advice}--accel none."
    if not hidden:
        yield "ok", "no mask hides all devices of a kind", ""


def _locks(subject: _Subject) -> Iterator[_Result]:
    folder = default_folder()
    exists = os.path.lexists(folder)
    problem = folder_problem(folder) if exists else None
    if not exists and not os.access(folder.parent, os.W_OK | os.X_OK):
        problem = f"cannot be created, because {folder.parent} is no directory that this user may write to"
    if problem is not None:
        advice = "PYTEST_ACCEL_LOCK_DIR names another folder: on a local disk, writable for every session's user."
        yield "problem", f"{folder} {problem}: no device can be leased", advice
    else:
        yield "ok", f"{folder} {'can be used' if exists else 'will be created by the first session'}", ""


def _launcher(subject: _Subject) -> Iterator[_Result]:
    if (first := next(launcher_env.recognized(os.environ), None)) is not None:
        yield "ok", f"rank {first.rank} of {first.size} under {first.launcher}, {first.local_size} on this machine", ""
    elif variables := launcher_env.variables_here(os.environ):
        what = f"{_assignments(variables)} do not show a launcher: this process would run all tests by itself"
        yield "note", what, "Unset them, or pass on all variables of the launcher: it sets more for its processes."
    else:
        yield "ok", "no launcher has started this process", ""


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in variables.items())


_CHECKS: dict[str, Callable[[_Subject], Iterator[_Result]]] = {
    "devices": _devices,
    "torch": _torch,
    "masks": _masks,
    "locks": _locks,
    "launcher": _launcher,
}
