"""The checks of the doctor: pure functions that return findings on facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_accel.core.units import count_text, format_memory
from pytest_accel.features.doctor.facts import PLUGINS, Kind, MachineFacts
from pytest_accel.features.doctor.network import LauncherFacts, NetworkFacts, is_loopback
from pytest_accel.hardware.inventory import grouped

_SHARED_MEMORY = 64 * 2**20
"""Bytes of ``/dev/shm`` for each rank: Docker's default for a container, which is too little for more than one rank."""
_REMOTE = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs",
    "sshfs",
}  # fmt: skip
"""Names of network file systems in ``/proc/mounts``, where some have the prefix ``fuse.``."""
_IMPORT_FAILURES = {
    "unfit": "{}: ranks that are forked after that may hang",
    "failed": "fails: {}",
    "ended": "ends the process: {}",
    "hung": "did not finish within {}",
}
_GET_TORCH = "https://pytorch.org/get-started/locally/ lists the builds"

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    check: str
    state: State
    """`problem`: tests fail, hang or skip because of it. `note`: may be worth knowing."""
    what: str
    """The finding, in one sentence."""
    advice: str = ""
    """Advice to the user; empty if nothing needs to be done."""


def check(facts: MachineFacts) -> tuple[Finding, ...]:
    """Return the findings of all checks in their order; each check has at least one."""
    return tuple(Finding(name, *result) for name, judge in _CHECKS.items() for result in judge(facts))


_Result = tuple[State, str, str]
"""State, text and advice of a finding."""


def _driver(facts: MachineFacts) -> Iterator[_Result]:
    nvidia, state = facts.nvidia, _weight(facts, "cuda")
    if nvidia.error is not None:
        advice = "See what nvidia-smi says. After an update of the driver, its kernel module must be reloaded, for "
        advice += "example by a restart of the machine; restart a container with its GPUs."
        yield state, f"the NVIDIA driver does not answer: {nvidia.error}", advice
    elif nvidia.library:
        cuda = f", for CUDA up to {nvidia.cuda[0]}.{nvidia.cuda[1]}" if nvidia.cuda else ""
        yield "ok", f"the NVIDIA driver{f' {nvidia.version}' if nvidia.version else ''} answers{cuda}", ""
    elif nvidia.cards:
        are = f"{nvidia.cards} NVIDIA GPUs are" if nvidia.cards > 1 else "an NVIDIA GPU is"
        advice = "Install NVIDIA's driver; a container needs to be started with its GPUs (docker run --gpus all)."
        yield state, f"{are} on the PCI bus, but the driver's libnvidia-ml.so.1 cannot be loaded", advice
    else:
        yield "ok", "no NVIDIA driver, and no NVIDIA GPU on the PCI bus", ""


def _devices(facts: MachineFacts) -> Iterator[_Result]:
    asked = facts.kind(facts.accel)
    if facts.devices:
        yield "ok", f"the session has {facts.session}: {facts.devices}", ""
    elif asked is not None and asked.error is None and not asked.present:
        what = f"--accel {facts.accel}: there is no {facts.accel} device"
        yield "problem", what, "Name a kind that is present, or auto."
    elif facts.session == "none":
        yield "ok", "the session has no accelerator: ranks run on the CPU", ""
    else:
        which = "tests that need one" if facts.accel == facts.session else "tests that ask for one"
        yield "note", f"the session has no {facts.session} device that it may use: {which} skip", ""
    for kind in facts.kinds:
        if kind.error is not None:
            advice = "Name another kind with --accel. If a package publishes this one, update or uninstall it."
            yield _weight(facts, kind.name), kind.error, advice


def _torch(facts: MachineFacts) -> Iterator[_Result]:
    torch, nvidia = facts.torch, facts.nvidia
    if torch is None:
        what = "torch is not installed: distributed tests need init=False, and cannot use the fixtures of torch"
        yield "note", what, f"Install one that fits the hardware: {_GET_TORCH}."
        return
    built = " and ".join(f"{_BUILDS[name]} {version}" for name, version in torch.builds.items())
    fits = True
    cuda, version = facts.kind("cuda"), torch.builds.get("cuda", "")
    if cuda is not None and cuda.present and not version:
        fits = False
        advice = "Install a torch that is built for CUDA. On Linux, that of PyPI is: pip install --force-reinstall "
        advice += f"--index-url https://pypi.org/simple torch. {_GET_TORCH}."
        what = f"there are NVIDIA GPUs ({grouped(cuda.present)}), but torch {torch.version} is built for "
        yield _weight(facts, "cuda"), what + (built or "the CPU alone"), advice
    # A driver supports all CUDA releases of its major version (NVIDIA, "CUDA Compatibility", minor versions).
    if version and nvidia.cuda and nvidia.cuda[0] < _major(version):
        fits = False
        supported = f"{nvidia.cuda[0]}.{nvidia.cuda[1]}"
        what = f"torch {torch.version} is built for CUDA {version}, and the driver supports {supported} at most"
        advice = f"Update the driver, or install a torch that is built for CUDA {nvidia.cuda[0]}: {_GET_TORCH}."
        yield _weight(facts, "cuda"), what, advice
    for kind in facts.kinds:
        if kind.present and kind.lacking is not None:
            fits = False
            # With `auto` it is a note: the session ignores such a kind, which may be a chip in the processor.
            state: State = "problem" if facts.accel == kind.name else "note"
            advice = f"To use them, install what is missing ({_GET_TORCH} of torch)."
            yield state, f"{grouped(kind.present)} ({kind.name}) cannot be used: {kind.lacking}", advice
    if fits:
        yield "ok", f"torch {torch.version}, built for {built or 'the CPU alone'}", ""


def _masks(facts: MachineFacts) -> Iterator[_Result]:
    hidden = [kind for kind in facts.kinds if kind.inherited and kind.present and not kind.visible]
    for kind in hidden:
        masks = " ".join(f"{name}={value!r}" for name, value in kind.inherited.items())
        what = f"{masks} leaves none of {len(kind.present)} ({kind.name})"
        yield _weight(facts, kind.name), what, _unmask(kind)
    if not hidden:
        yield "ok", "no mask hides all devices of a kind", ""


def _unmask(kind: Kind) -> str:
    rocr, hip = (kind.inherited.get(f"{layer}_VISIBLE_DEVICES") for layer in ("ROCR", "HIP"))
    if kind.name == "rocm" and rocr is not None and rocr == hip:
        return (
            "HIP_VISIBLE_DEVICES counts only the devices that ROCR_VISIBLE_DEVICES leaves, so that setting both to the "
            "same value hides too many. Unset one of them."
        )
    variables = " and ".join(kind.inherited)
    return f"Unset {variables}, or name devices that are present. To run without devices, use --accel none."


def _forks(facts: MachineFacts) -> Iterator[_Result]:
    forks = facts.forks
    if forks is None:
        yield "note", "not checked, because torch is not installed", ""
    elif forks.outcome == "fit":
        yield "ok", "what ranks are forked from has one thread and no device runtime", ""
    elif forks.outcome == "unfit" and forks.name == PLUGINS:
        what = f"loading {PLUGINS} {forks.detail}: ranks are forked without them, which takes longer"
        yield "note", what, "Find the plugin that does: pytest -p no:NAME leaves one out."
    else:
        failure = _IMPORT_FAILURES[forks.outcome].format(forks.detail)
        yield "problem", f"importing {forks.name} {failure}", _advise_import(forks.name)


def _advise_import(name: str) -> str:
    if name.partition(".")[0] in ("torch", "pytest", "pytest_accel"):
        return (
            f'Try `python -c "import {name}"`. If that works, check what else Python loads when it starts '
            "(sitecustomize, .pth files, LD_PRELOAD), and OPENBLAS_NUM_THREADS."
        )
    if name == PLUGINS:
        return "Try `pytest --version --version`, and leave plugins out with -p no:NAME until it works."
    return f"Take {name} out of accel_preload, or fix it."


def _locks(facts: MachineFacts) -> Iterator[_Result]:
    locks = facts.locks
    elsewhere = "PYTEST_ACCEL_LOCK_DIR names another folder: on a local disk, writable for every session's user."
    if locks.problem is not None:
        yield "problem", f"{locks.path} {locks.problem}: no device can be leased", elsewhere
    else:
        yield "ok", f"{locks.path} {'can be used' if locks.exists else 'will be created by the first session'}", ""
    if locks.filesystem is not None and locks.filesystem.removeprefix("fuse.") in _REMOTE:
        what = f"{locks.path} is on a network file system ({locks.filesystem}): locks may not hold there, and sessions "
        yield "note", what + "of other machines may be taken for this one's", elsewhere


def _memory(facts: MachineFacts) -> Iterator[_Result]:
    size = facts.shared_memory
    if size is None:
        yield "ok", "this system has no /dev/shm", ""
        return
    enough, ranks = _SHARED_MEMORY * facts.ranks, count_text(facts.ranks, "rank")
    if size < enough:
        what = f"/dev/shm holds {format_memory(size)}, which is little for {ranks}: NCCL and data loaders share memory "
        advice = f"In a container: docker run --shm-size={format_memory(enough).replace(' ', '').lower()[:-2]}, or "
        yield "note", what + "there", advice + "--ipc=host."
    else:
        yield "ok", f"/dev/shm holds {format_memory(size)}, enough for {ranks}", ""


def _launcher(facts: MachineFacts) -> Iterator[_Result]:
    launch = facts.launch
    shown = _assignments(launch.variables)
    if not launch.variables:
        yield "ok", "no launcher has started this process", ""
    elif not launch.launchers:
        advice = "Unset them: a launcher sets them for its processes."
        if launch.incomplete is not None:
            launcher, lacking = launch.incomplete
            advice = f"{launcher} also sets {', '.join(lacking)}. Pass all of them on, or unset these."
        yield "note", f"{shown} do not show a launcher: this process would run all tests by itself", advice
    else:
        first, *others = launch.launchers
        if not (first.rank < first.size and first.local_rank < first.local_size <= first.size):
            advice = f"Unset those that a shell exports: {first.launcher} sets them for each process."
            yield "problem", f"the variables of {first.launcher} contradict each other: {shown}", advice
        else:
            where = f"rank {first.rank} of {first.size} under {first.launcher}, {first.local_size} on this machine"
            outer = [one for one in others if (one.rank, one.size) != (first.rank, first.size)]
            within = "".join(f"; within {one.launcher}: rank {one.rank} of {one.size}" for one in outer)
            yield "ok", where + within, ""
        expected = {"RANK": str(first.rank), "WORLD_SIZE": str(first.size)}
        differ = {name: value for name, value in launch.variables.items() if value != expected.get(name, value)}
        if differ:
            what = f"{_assignments(differ)} is not what {first.launcher} says"
            yield "note", what, "Unset it: scripts that read it disagree with the launcher."


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in variables.items())


def _programs(facts: MachineFacts) -> Iterator[_Result]:
    installed = facts.launch.installed
    found = [f"{name} {version}" for name, version in installed.items() if version is not None]
    absent = [name for name, version in installed.items() if version is None]
    without = f"; not installed: {', '.join(absent)}" if absent else ""
    yield "ok", f"launchers: {', '.join(found) or 'none'}{without}", ""


def _network(facts: MachineFacts) -> Iterator[_Result]:
    network, launch = facts.network, facts.launch
    bad: State = "problem" if launch.joins_machines else "note"
    matters: State = "problem" if launch.joins_machines else "ok"
    if not network.address:
        yield matters, "this machine has only loopback: no other machine can reach it", ""
    else:
        what = f"other machines reach this one at {network.address} ({network.interface})"
        known = network.address in network.named
        if not known:
            what += f"; its name {network.name} has {', '.join(network.named) or 'no address'} here"
        yield "note" if launch.joins_machines and not known else "ok", what, ""
    if network.no_port is not None:
        yield bad, f"no port can be opened here: {network.no_port}", "Choose another MASTER_PORT."
    if any(network.master):
        address, port = network.master
        state, what, advice = _meeting(network, launch, bad)
        yield state, f"MASTER_ADDR={address!r} MASTER_PORT={port!r}: {what}", advice
    elif launch.joins_machines:
        what = "MASTER_ADDR and MASTER_PORT are not set, and the processes are on several machines"
        yield "problem", what, "Export an address of rank 0's machine, and a free port there, to all processes."


def _meeting(network: NetworkFacts, launch: LauncherFacts, bad: State) -> _Result:
    """Judge the address where the processes of a launcher meet; `bad` is the state of what keeps them from it."""
    advice = "MASTER_ADDR must be an address of rank 0's machine that all machines reach, and MASTER_PORT a free port."
    if not network.answer:
        return bad, "there is no such address or port", advice
    if launch.joins_machines and all(map(is_loopback, network.meeting)):
        return bad, f"{network.meeting[0]} is loopback, at which other machines reach themselves", advice
    if launch.joins_machines and launch.launchers[0].rank == 0 and not network.here:
        return bad, "another machine, although rank 0 is here", advice
    if network.answer == "answers":
        if network.here:
            return (
                "note",
                "in use: a process listens there",
                "If neither a session waits nor torchrun runs, another program has the port.",
            )
        return "ok", "a process listens there, and can be reached", ""
    if network.here:
        return "ok", "this machine, and the port is free", ""
    if network.answer == "refused":
        return (
            "note",
            "the machine can be reached, and nothing listens there",
            "While a session waits, rank 0 must listen there.",
        )
    return bad, f"cannot be reached: {network.answer}", f"{advice} See also the firewalls."


def _weight(facts: MachineFacts, kind: str) -> State:
    """Return the state of a finding about `kind`: a note if the session does not use this kind, else a problem."""
    return "problem" if facts.accel in ("auto", kind) else "note"


def _major(version: str) -> int:
    match = re.match(r"\d+", version)
    return int(match.group()) if match else 0


_BUILDS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}

_CHECKS: dict[str, Callable[[MachineFacts], Iterator[_Result]]] = {
    "driver": _driver,
    "devices": _devices,
    "torch": _torch,
    "masks": _masks,
    "forks": _forks,
    "locks": _locks,
    "memory": _memory,
    "launcher": _launcher,
    "programs": _programs,
    "network": _network,
}
