"""The checks of the doctor: each looks at a part of this machine, and yields what it finds.

They import no torch, initialize no device runtime and write nothing. A temporary process imports the fork server's
modules, to see whether ranks can be forked. The check of the network sends nothing: it opens a port for a moment, and
closes a connection to `MASTER_ADDR` at once.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from pytest_accel.core import launcher_env, threads
from pytest_accel.core.device import Device
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.kinds import kinds
from pytest_accel.hardware.inventory import Inventory, Machine, grouped
from pytest_accel.hardware.registry import VendorError, describe_kind, make_vendor
from pytest_accel.hardware.sysfs import read_text
from pytest_accel.hardware.torch_build import versions
from pytest_accel.hardware.vendors.nvml import driver_installed, optional
from pytest_accel.leases.shared_folder import default_folder, folder_problem
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings

_GET_TORCH = "https://pytorch.org/get-started/locally/ lists the builds"
_IMPORT_TIMEOUT = 120.0
"""Seconds for all imports. Torch alone may take 30 s from a network drive if it is not cached."""
_ANSWER_TIMEOUT = 3.0
"""Seconds that a name server, and the process at `MASTER_ADDR`, may take to answer."""

State = Literal["ok", "note", "problem"]
_Result = tuple[State, str, str]
"""State, text and advice of a finding."""


class Finding(NamedTuple):
    """One result of a check."""

    check: str
    state: State
    """`problem`: tests fail, hang or skip because of it. `note`: may be worth knowing."""
    what: str
    """The finding, in one sentence."""
    advice: str = ""
    """Advice to the user; empty if nothing needs to be done."""


class _Kind(NamedTuple):
    """One kind of device on this machine, according to its vendor module."""

    name: str
    present: tuple[Device, ...] = ()
    visible: tuple[Device, ...] = ()
    """The devices that the inherited masks leave."""
    inherited: Mapping[str, str] = {}
    """Name and value of the kind's mask variables that are set."""
    lacking: str | None = None
    """The part that torch lacks to use the kind, as text; None if it lacks nothing."""
    error: str | None = None
    """Why the kind cannot be used; None if it can."""


class _Subject(NamedTuple):
    """The machine as the session of the settings sees it."""

    settings: Settings
    accel: str
    """The name in ``--accel``: ``auto``, ``none`` or a kind."""
    inventory: Inventory | None
    """The session's devices; None if the kind that it names cannot be used."""
    kinds: Sequence[_Kind]

    def weight(self, kind: str) -> State:
        """Return the state of a finding about `kind`: a note if the session does not use this kind, else a problem."""
        return "problem" if self.accel in ("auto", kind) else "note"


def check(settings: Settings) -> list[Finding]:
    """Return the findings of all checks in their order; each check has at least one.

    Raise ValueError if a setting does not fit the machine.
    """
    machine = machine_for(settings)
    try:
        inventory = machine.session
    except VendorError:
        inventory = None  # `_devices` yields the error of this kind.
    accel = settings.accel.strip().partition(":")[0]
    subject = _Subject(settings, accel, inventory, [_look_for(kind, machine) for kind in kinds()])
    return [Finding(name, *result) for name, look in _CHECKS.items() for result in look(subject)]


def _look_for(kind: str, machine: Machine) -> _Kind:
    try:
        vendor = make_vendor(kind, machine.argument(kind))
    except VendorError as error:
        return _Kind(kind, error=str(error))
    except ValueError:
        return _Kind(kind)  # The kind needs an argument in --accel, and has none here. This is not an error.
    inherited = {name: os.environ[name] for name in vendor.mask_variables if name in os.environ}
    try:
        present = vendor.discover()
        return _Kind(kind, present, vendor.visible(present, os.environ), inherited, vendor.lacking())
    except Exception as error:
        # Another package's vendor code may raise anything. The other findings are still needed.
        why = f"{describe_kind(kind)}: its devices cannot be looked up: {type(error).__name__}: {error}"
        return _Kind(kind, inherited=inherited, error=why)


def _devices(subject: _Subject) -> Iterator[_Result]:
    session, accel = subject.inventory, subject.accel
    asked = next((kind for kind in subject.kinds if kind.name == accel), None)
    if session is not None and session.devices:
        yield "ok", f"the session has {session.kind}: {grouped(session.devices)}", ""
    elif asked is not None and asked.error is None and not asked.present:
        yield "problem", f"--accel {accel}: there is no {accel} device", "Name a kind that is present, or auto."
    elif session is None or session.kind == "none":
        yield "ok", "the session has no accelerator: ranks run on the CPU", ""
    else:
        which = "tests that need one" if session.named else "tests that ask for one"
        yield "note", f"the session has no {session.kind} device that it may use: {which} skip", ""
    driver = _nvidia_driver()
    if isinstance(driver, str):
        advice = "See what nvidia-smi says. After an update of the driver, its kernel module must be reloaded, for "
        advice += "example by a restart of the machine; restart a container with its GPUs."
        yield subject.weight("cuda"), f"the NVIDIA driver does not answer: {driver}", advice
    elif driver is None and (cards := _nvidia_cards(Path("/"))):
        advice = "Install NVIDIA's driver; a container needs to be started with its GPUs (docker run --gpus all)."
        what = f"NVIDIA GPUs on the PCI bus: {cards}, but the driver's libnvidia-ml.so.1 cannot be loaded"
        yield subject.weight("cuda"), what, advice
    for kind in subject.kinds:
        if kind.error is not None:
            advice = "Name another kind with --accel. If a package publishes this one, update or uninstall it."
            yield subject.weight(kind.name), kind.error, advice


def _nvidia_driver() -> tuple[int, int] | str | None:
    """Return the newest CUDA of NVIDIA's driver, or why it does not answer; None if there is no driver."""
    if not driver_installed():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    try:
        # In the format of cuDriverGetVersion: 12040 is CUDA 12.4 (NVML reference, system queries).
        cuda = optional(pynvml, pynvml.nvmlSystemGetCudaDriverVersion_v2) or 0
        return cuda // 1000, cuda % 1000 // 10
    finally:
        pynvml.nvmlShutdown()


def _nvidia_cards(root: Path) -> int:
    """Return the number of NVIDIA GPUs that sysfs, below `root`, shows on the PCI bus."""
    # 0x03 is the base class of display controllers. GPUs without a display output are in it too (0x0302).
    return sum(
        read_text(device / "vendor") == "0x10de" and read_text(device / "class").startswith("0x03")
        for device in (root / "sys/bus/pci/devices").glob("*")
    )


def _torch_version() -> str | None:
    """Return the version of the installed torch; None if there is none."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("torch")
    return None


def _torch(subject: _Subject) -> Iterator[_Result]:
    torch, builds, driver = _torch_version(), versions(), _nvidia_driver()
    if torch is None:
        what = "torch is not installed: distributed tests need init=False, and cannot use the fixtures of torch"
        yield "note", what, f"Install one that fits the hardware: {_GET_TORCH}."
        return
    cuda, built = builds.get("cuda", ""), " and ".join(map(" ".join, builds.items())) or "the CPU alone"
    found: list[_Result] = []
    for kind in subject.kinds:
        if kind.name == "cuda" and kind.present and not cuda:
            advice = "Install a torch that is built for CUDA. On Linux, that of PyPI is: pip install --force-reinstall "
            advice += f"--index-url https://pypi.org/simple torch. {_GET_TORCH}."
            what = f"there are NVIDIA GPUs ({grouped(kind.present)}), but torch {torch} is built for {built}"
            found.append((subject.weight("cuda"), what, advice))
        elif kind.present and kind.lacking is not None:
            # With `auto` it is a note: the session ignores such a kind, which may be a chip in the processor.
            state: State = "problem" if subject.accel == kind.name else "note"
            what = f"{grouped(kind.present)} ({kind.name}) cannot be used: {kind.lacking}"
            found.append((state, what, f"To use them, install what is missing ({_GET_TORCH} of torch)."))
    if isinstance(driver, tuple) and (conflict := _too_new(cuda, driver)) is not None:
        advice = f"Update the driver, or install a torch that is built for CUDA {driver[0]}: {_GET_TORCH}."
        found.append((subject.weight("cuda"), f"torch {torch} is built for {conflict}", advice))
    yield from found or [("ok", f"torch {torch}, built for {built}", "")]


def _too_new(cuda: str, newest: tuple[int, int]) -> str | None:
    """Return a text if a torch for this `cuda` needs a driver for more than its `newest` CUDA; None if it does not.

    A driver supports all CUDA releases of its major version (NVIDIA, "CUDA Compatibility", minor versions).
    """
    major = re.match(r"\d+", cuda)
    if major is None or not newest[0] or newest[0] >= int(major[0]):
        return None
    return f"CUDA {cuda}, and the driver supports {newest[0]}.{newest[1]} at most"


def _masks(subject: _Subject) -> Iterator[_Result]:
    hidden = [kind for kind in subject.kinds if kind.inherited and kind.present and not kind.visible]
    for kind in hidden:
        what = f"{_assignments(kind.inherited)} leaves none of {len(kind.present)} ({kind.name})"
        advice = f"Unset {' and '.join(kind.inherited)}, or name devices that are present. To run without devices, use "
        if len(kind.inherited) > 1:
            advice = f"The masks count within each other: unset all but one. {advice}"
        yield subject.weight(kind.name), what, f"{advice}--accel none."
    if not hidden:
        yield "ok", "no mask hides all devices of a kind", ""


def _forks(subject: _Subject) -> Iterator[_Result]:
    if _torch_version() is None:
        yield "note", "not checked, because torch is not installed", ""
    elif (failure := try_forks(() if subject.settings.preload == "none" else subject.settings.preload)) is None:
        yield "ok", "what ranks are forked from has one thread and no device runtime", ""
    elif failure.startswith(f"{_PLUGINS}: "):
        advice = "Find the plugin with pytest -p no:NAME, which leaves one out."
        yield "note", f"ranks are forked without {failure}, which takes longer", advice
    else:
        advice = "Try `python -c` with this import. If that works, check what else Python loads when it starts "
        yield "problem", f"no rank can be forked: {failure}", f"{advice}(sitecustomize, .pth files, LD_PRELOAD)."


def try_forks(modules: Sequence[str], timeout: float = _IMPORT_TIMEOUT) -> str | None:
    """Import `modules` after those of every fork server in a temporary process.

    Return why ranks cannot be forked after that; None if they can.
    """
    source = f"import os, {__name__} as checks; checks.import_and_report(); os._exit(0)"
    # This process owns the folder, because the other one may be killed before it could remove it.
    with (
        tempfile.TemporaryDirectory(prefix="accel-doctor-") as folder,
        subprocess.Popen(
            python_command(source, folder, *modules, path=sys.path),
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=timeout)
            ended = f"it ends the process with status {process.returncode}"
        except subprocess.TimeoutExpired as error:
            output, ended = error.output or b"", f"it did not finish within {timeout:g} seconds"
        finally:
            # Kill processes that an import has started: they hold the pipe open, and would leak.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    # Other lines are ignored: a `sitecustomize` module may print when the process starts.
    lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith(_MARK)]
    last = lines[-1].removeprefix(_MARK) if lines else "importing pytest_accel"
    return None if last == _DONE else f"{last}: {ended}" if last.startswith("importing ") else last


_MARK, _DONE, _PLUGINS = "accel-doctor: ", "done", "pytest's plugins"


def import_and_report() -> None:
    """Run in the temporary process: print a line before each import, and one for a failure or the end.

    Its arguments are a folder in which to load pytest's plugins, and the names of more modules.
    """
    folder, *modules = sys.argv[1:]
    # Imported modules may print: give them stderr as stdout.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(line: str) -> None:
        print(_MARK + " ".join(line.split()), file=output, flush=True)

    report("importing pytest_accel.forkserver.preload")
    from pytest_accel.forkserver.preload import RANK_MODULES, TORCH_MODULES, import_named, load_plugins, unfit

    failure: str | None = None
    for name in (*RANK_MODULES, *TORCH_MODULES, *modules, _PLUGINS):
        report(f"importing {name}")
        if name in modules:
            failure = import_named([name])
        else:
            try:
                if name == _PLUGINS:
                    load_plugins(folder)
                else:
                    importlib.import_module(name)
                failure = None if (reason := unfit()) is None else f"{name}: the import {reason}"
            except BaseException as error:
                failure = f"the import of {name} fails: {type(error).__name__}: {error}"
        if failure is not None:
            break
    report(failure or _DONE)


def _locks(subject: _Subject) -> Iterator[_Result]:
    folder = default_folder()
    exists, problem = os.path.lexists(folder), None
    if exists:
        problem = folder_problem(folder)
    elif not (folder.parent.is_dir() and os.access(folder.parent, os.W_OK | os.X_OK)):
        problem = f"cannot be created, because {folder.parent} is not a directory that this user may write to"
    if problem is not None:
        advice = "PYTEST_ACCEL_LOCK_DIR names another folder: on a local disk, writable for every session's user."
        yield "problem", f"{folder} {problem}: no device can be leased", advice
    else:
        yield "ok", f"{folder} {'can be used' if exists else 'will be created by the first session'}", ""


def _launcher(subject: _Subject) -> Iterator[_Result]:
    first = next(launcher_env.recognized(os.environ), None)
    variables = launcher_env.variables_here(os.environ)
    shown = _assignments(variables)
    if not variables:
        yield "ok", "no launcher has started this process", ""
    elif first is None:
        advice = "Unset them: a launcher sets them for its processes."
        if (incomplete := launcher_env.incomplete(os.environ)) is not None:
            launcher, lacking = incomplete
            advice = f"{launcher} also sets {', '.join(lacking)}. Pass all of them on, or unset these."
        yield "note", f"{shown} do not show a launcher: this process would run all tests by itself", advice
    elif not (first.rank < first.size and first.local_rank < first.local_size <= first.size):
        advice = f"Unset those that a shell exports: {first.launcher} sets them for each process."
        yield "problem", f"the variables of {first.launcher} contradict each other: {shown}", advice
    else:
        where = f"rank {first.rank} of {first.size} under {first.launcher}, {first.local_size} on this machine"
        yield "ok", where, ""
        expected = {"RANK": str(first.rank), "WORLD_SIZE": str(first.size)}
        differ = {name: value for name, value in variables.items() if value != expected.get(name, value)}
        if differ:
            what = f"{_assignments(differ)} is not what {first.launcher} says"
            yield "note", what, "Unset it: scripts that read it disagree with the launcher."


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in variables.items())


def _network(subject: _Subject) -> Iterator[_Result]:
    """Look at the address where the processes of a launcher on several machines meet."""
    process = next(launcher_env.recognized(os.environ), None)
    joins = process is not None and process.local_size < process.size
    bad: State = "problem" if joins else "note"
    master, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if master or port:
        state, what = _meeting(master, port, bad, is_first=joins and process is not None and process.rank == 0)
        advice = "MASTER_ADDR must be an address of rank 0's machine that all machines reach, and MASTER_PORT a free "
        advice += "port there, at which rank 0 listens while a session waits. See also the firewalls."
        yield state, f"MASTER_ADDR={master!r} MASTER_PORT={port!r}: {what}", "" if state == "ok" else advice
    elif joins:
        what = "MASTER_ADDR and MASTER_PORT are not set, and the processes are on several machines"
        yield "problem", what, "Export an address of rank 0's machine, and a free port there, to all processes."
    else:
        yield "ok", "no processes of a launcher on several machines have to meet", ""


def _meeting(master: str, port: str, bad: State, *, is_first: bool) -> tuple[State, str]:
    """Judge the address where processes meet; `is_first` is True in rank 0 of a launcher on several machines."""
    found = _look_up(master) if port.isdecimal() and 0 < int(port) < 1 << 16 else ()
    if not found:
        return bad, "there is no such address or port"
    loopback = [one.startswith("127.") or one == "::1" for one in found]
    if bad == "problem" and all(loopback):
        return bad, f"{found[0]} is loopback, at which other machines reach themselves"
    here = any(loopback) or not {one.address for all in psutil.net_if_addrs().values() for one in all}.isdisjoint(found)
    if is_first and not here:
        return bad, "another machine, although rank 0 is here"
    answer = _call(found, int(port))
    if answer == "answers":
        return ("note", "in use: a process listens there") if here else ("ok", "a process listens there")
    if here:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            return bad, f"no port can be opened here: {os.strerror(error.errno or 0)}"
        return "ok", "this machine, and the port is free"
    if answer == os.strerror(errno.ECONNREFUSED):
        return "note", "the machine can be reached, and nothing listens there"
    return bad, f"cannot be reached: {answer}"


def _look_up(name: str) -> tuple[str, ...]:
    """Return the addresses of `name`; none if it is unknown, or if the name server does not answer in time."""
    found: list[str] = []

    def look() -> None:
        with suppress(OSError, ValueError):
            found.extend(str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))

    threads.start(look, "accel-look-up").join(_ANSWER_TIMEOUT)
    return tuple(dict.fromkeys(found))


def _call(addresses: Sequence[str], port: int) -> str:
    """Return ``answers``, or why the last of `addresses` cannot be reached. A session tries them all, too."""
    answer = ""
    for address in addresses:
        try:
            socket.create_connection((address, port), _ANSWER_TIMEOUT).close()
        except OSError as error:
            answer = error.strerror or str(error)
        else:
            return "answers"
    return answer


_CHECKS: dict[str, Callable[[_Subject], Iterator[_Result]]] = {
    "devices": _devices,
    "torch": _torch,
    "masks": _masks,
    "forks": _forks,
    "locks": _locks,
    "launcher": _launcher,
    "network": _network,
}
