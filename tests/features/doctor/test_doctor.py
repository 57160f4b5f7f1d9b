"""Tests of ``python -m pytest_accel doctor``: its checks on given facts, how it gathers facts, and the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core.device import Device
from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.features.doctor.checks import Finding, check
from pytest_accel.features.doctor.commands import findings_json, findings_text
from pytest_accel.features.doctor.facts import (
    PLUGINS,
    Forks,
    Kind,
    LockFolder,
    MachineFacts,
    Nvidia,
    Torch,
    conclude,
    filesystem_of,
    look_at_locks,
    look_for_nvidia,
    try_forks,
)
from pytest_accel.features.doctor.network import LauncherFacts, NetworkFacts
from pytest_accel.leases.shared_folder import VARIABLE

ROOT = Path(__file__).resolve().parents[3]
GIB = 1024**3
GPUS = tuple(Device("cuda", f"GPU-{n}", n, "NVIDIA T4", memory=16 * GIB) for n in range(2))
CUDA = Kind("cuda", present=GPUS, visible=GPUS)
ROCM = Kind("rocm", present=(Device("rocm", "GPU-a", 0, "AMD gfx942"),))
CHECKS = ["driver", "devices", "torch", "masks", "forks", "locks", "memory", "launcher", "programs", "network"]

# The facts of a machine without problems.
FINE = MachineFacts(
    accel="auto",
    session="cuda",
    devices="2 x NVIDIA T4 (16 GiB)",
    ranks=2,
    torch=Torch("2.9.0+cu128", {"cuda": "12.8"}),
    nvidia=Nvidia(2, library=True, version="550.54", cuda=(12, 4)),
    kinds=(CUDA, Kind("rocm"), Kind("cpu"), Kind("sim")),
    forks=Forks("fit"),
    locks=LockFolder("/tmp/locks", filesystem="ext4"),
    launch=LauncherFacts(),
    network=NetworkFacts("here", ("10.0.0.1",), "10.0.0.1", "eth0"),
    shared_memory=GIB,
)
# Process 0 of a launcher that has started two processes, each on a machine of its own.
FIRST = LauncherEnv("mpirun", rank=0, size=2, local_rank=0, local_size=1, job=("1",))


def findings_of(facts: MachineFacts, name: str) -> list[Finding]:
    """Return the findings of the check `name`."""
    return [finding for finding in check(facts) if finding.check == name]


def with_kind(kind: Kind, **more: Any) -> MachineFacts:
    """Return the facts `FINE` with another `kind` in place of the one with its name, and with the fields `more`."""
    return replace(FINE, kinds=tuple(kind if one.name == kind.name else one for one in FINE.kinds), **more)


def test_a_machine_without_problems_passes_every_check() -> None:
    findings = check(FINE)
    assert [finding.check for finding in findings] == CHECKS
    assert {finding.state for finding in findings} == {"ok"}


def launched(process: LauncherEnv = FIRST, *outer: LauncherEnv, **network: Any) -> MachineFacts:
    """Return the facts `FINE` in a process of a launcher, with the fields `network` of the network.

    Without these, the process is one that can join.
    """
    fields = {"master": ("10.0.0.1", "29500"), "meeting": ("10.0.0.1",), "here": True, "answer": "refused", **network}
    variables = {"OMPI_COMM_WORLD_RANK": str(process.rank)}
    launch = LauncherFacts((process, *outer), variables)
    return replace(FINE, launch=launch, network=replace(FINE.network, **fields))


def masked(**masks: str) -> Kind:
    """Return the kind cuda with all devices hidden by `masks`."""
    return replace(CUDA, visible=(), inherited=masks)


CASES: list[tuple[MachineFacts, str, str, str, str]] = [
    (replace(FINE, nvidia=Nvidia(2)), "driver", "problem", "2 NVIDIA GPUs are on the PCI bus", "--gpus all"),
    (replace(FINE, nvidia=Nvidia(1), accel="sim"), "driver", "note", "an NVIDIA GPU is on the PCI bus", "Install"),
    (
        replace(FINE, nvidia=Nvidia(2, True, "Driver/library version mismatch")),
        "driver",
        "problem",
        "mismatch",
        "restart",
    ),
    (replace(FINE, accel="rocm", session="rocm", devices=""), "devices", "problem", "no rocm device", "auto"),
    (replace(FINE, devices=""), "devices", "note", "no cuda device that it may use", ""),
    (
        with_kind(Kind("rocm", error="kind 'rocm': its devices cannot be"), accel="rocm"),
        "devices",
        "problem",
        "cannot be",
        "another kind",
    ),
    (replace(FINE, torch=None), "torch", "note", "distributed tests need init=False", "pytorch.org"),
    (
        replace(FINE, torch=Torch("2.9.0+cpu")),
        "torch",
        "problem",
        "2.9.0+cpu is built for the CPU alone",
        "--force-reinstall",
    ),
    (replace(FINE, torch=Torch("2.9", {"hip": "6.4"})), "torch", "problem", "built for ROCm 6.4", "built for CUDA"),
    (
        replace(FINE, torch=Torch("2.9", {"cuda": "13.0"})),
        "torch",
        "problem",
        "the driver supports 12.4 at most",
        "CUDA 12",
    ),
    (
        with_kind(replace(ROCM, lacking="torch is not built for ROCm")),
        "torch",
        "note",
        "AMD gfx942 (rocm) cannot",
        "install",
    ),
    (
        with_kind(masked(CUDA_VISIBLE_DEVICES="")),
        "masks",
        "problem",
        "CUDA_VISIBLE_DEVICES='' leaves none of 2",
        "Unset",
    ),
    (with_kind(masked(CUDA_VISIBLE_DEVICES=""), accel="none"), "masks", "note", "leaves none of 2", "--accel none"),
    (
        with_kind(replace(ROCM, inherited={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"})),
        "masks",
        "problem",
        "ROCR_VISIBLE_DEVICES='1' HIP_VISIBLE_DEVICES='1' leaves none of 1",
        "HIP_VISIBLE_DEVICES counts only the devices that ROCR_VISIBLE_DEVICES leaves",
    ),
    (
        replace(FINE, forks=Forks("unfit", "torch", "starts threads")),
        "forks",
        "problem",
        "torch starts threads",
        "LD_PRELOAD",
    ),
    (replace(FINE, forks=Forks("unfit", "mine", "starts threads")), "forks", "problem", "mine starts", "Take mine out"),
    (replace(FINE, forks=Forks("unfit", PLUGINS, "starts threads")), "forks", "note", "plugins starts", "-p no:NAME"),
    (
        replace(FINE, forks=Forks("failed", PLUGINS, "ImportError: x")),
        "forks",
        "problem",
        "ImportError: x",
        "-p no:NAME",
    ),
    (
        replace(FINE, forks=Forks("ended", "torch", "signal 4")),
        "forks",
        "problem",
        "torch ends the process: signal 4",
        "Try",
    ),
    (
        replace(FINE, forks=Forks("hung", "torch", "9 seconds")),
        "forks",
        "problem",
        "did not finish within 9 seconds",
        "Try",
    ),
    (replace(FINE, forks=None), "forks", "note", "not checked", ""),
    (replace(FINE, locks=LockFolder("/l", problem="is not a directory")), "locks", "problem", "/l is not a", VARIABLE),
    (replace(FINE, locks=LockFolder("/l", filesystem="nfs4")), "locks", "note", "network file system (nfs4)", VARIABLE),
    (replace(FINE, locks=LockFolder("/l", filesystem="fuse.glusterfs")), "locks", "note", "fuse.glusterfs", VARIABLE),
    (
        replace(FINE, shared_memory=64 * 2**20),
        "memory",
        "note",
        "holds 64 MiB, which is little for 2",
        "--shm-size=128m,",
    ),
    (
        replace(FINE, launch=LauncherFacts((), {"RANK": "0"})),
        "launcher",
        "note",
        "RANK='0' do not show a launcher: this process would run all tests by itself",
        "Unset them",
    ),
    (
        replace(FINE, launch=LauncherFacts((), {"PMI_RANK": "0"}, ("mpirun", ("PMI_SIZE",)))),
        "launcher",
        "note",
        "PMI_RANK='0' do not show a launcher",
        "mpirun also sets PMI_SIZE.",
    ),
    (
        launched(FIRST._replace(rank=2)),
        "launcher",
        "problem",
        "the variables of mpirun contradict each other: OMPI_COMM_WORLD_RANK='2'",
        "mpirun sets them for each process",
    ),
    (
        replace(FINE, launch=LauncherFacts((FIRST._replace(local_size=2),), {"RANK": "1", "WORLD_SIZE": "2"})),
        "launcher",
        "note",
        "RANK='1' is not what mpirun says",
        "Unset it",
    ),
    (launched(master=("", "")), "network", "problem", "MASTER_ADDR and MASTER_PORT are not set", "a free port there"),
    (launched(answer=""), "network", "problem", "MASTER_PORT='29500': there is no such address or port", "MASTER_PORT"),
    (launched(meeting=("127.0.1.1",)), "network", "problem", "127.0.1.1 is loopback", "all machines reach"),
    (launched(here=False), "network", "problem", "another machine, although rank 0 is here", "rank 0's machine"),
    (launched(answer="answers"), "network", "note", "in use: a process listens there", "another program has the port"),
    (
        launched(FIRST._replace(rank=1), here=False),
        "network",
        "note",
        "can be reached, and nothing listens there",
        "rank 0 must listen there",
    ),
    (
        launched(FIRST._replace(rank=1), here=False, answer="timed out"),
        "network",
        "problem",
        "MASTER_ADDR='10.0.0.1' MASTER_PORT='29500': cannot be reached: timed out",
        "firewalls",
    ),
    (launched(address=""), "network", "problem", "only loopback", ""),
    (launched(named=("127.0.1.1",)), "network", "note", "10.0.0.1 (eth0); its name here has 127.0.1.1 here", ""),
    (launched(no_port="Permission denied"), "network", "problem", "opened here: Permission denied", "MASTER_PORT"),
    (
        replace(FINE, kinds=(*FINE.kinds, Kind("toy", error="kind 'toy' cannot be loaded"))),
        "devices",
        "problem",
        "kind 'toy' cannot be loaded",
        "uninstall",
    ),
]


@pytest.mark.parametrize(("facts", "name", "state", "what", "advice"), CASES)
def test_each_problem_has_its_message(facts: MachineFacts, name: str, state: str, what: str, advice: str) -> None:
    findings = [finding for finding in findings_of(facts, name) if finding.state != "ok"]
    assert [finding.state for finding in findings] == [state]
    assert what in findings[0].what
    assert advice in findings[0].advice
    assert bool(advice) == bool(findings[0].advice)
    assert list(dict.fromkeys(finding.check for finding in check(facts))) == CHECKS, "a check has no finding"


@pytest.mark.parametrize(
    "facts",
    [
        with_kind(replace(CUDA, visible=GPUS[:1], inherited={"CUDA_VISIBLE_DEVICES": "0"})),
        with_kind(Kind("cuda", inherited={"CUDA_VISIBLE_DEVICES": "0"})),
        replace(FINE, shared_memory=128 * 2**20),
        replace(FINE, shared_memory=None),
        replace(FINE, nvidia=Nvidia(), session="none", devices="", kinds=(), torch=Torch("2.9+cpu")),
        replace(FINE, locks=LockFolder("/l", exists=False, filesystem="tmpfs")),
        replace(FINE, torch=Torch("2.9", {"cuda": "12.9"})),
        launched(),
        launched(FIRST._replace(rank=1), here=False, answer="answers"),
        # One machine needs no network.
        replace(FINE, network=NetworkFacts("here")),
        replace(FINE, network=replace(FINE.network, named=("127.0.1.1",))),
    ],
)
def test_facts_without_a_problem_have_no_message(facts: MachineFacts) -> None:
    assert [finding for finding in check(facts) if finding.state != "ok"] == []


def test_findings_are_shown_as_text_and_json() -> None:
    findings = check(replace(FINE, torch=Torch("2.9.0+cpu"), shared_memory=1))
    lines = findings_text(findings).splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("problem  torch     there are NVIDIA GPUs"))
    assert "-> Install a torch that is built for CUDA" in " ".join(" ".join(lines[at : at + 4]).split())
    assert lines[-1] == "1 problem, 1 note"
    assert max(map(len, lines)) <= 110
    document = findings_json(findings)
    assert document["problems"] == 1
    assert {"check": "masks", "state": "ok", "what": "no mask hides all devices of a kind", "advice": None} in document[
        "findings"
    ]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("lines", "status", "hung", "forks"),
    [
        (['{"importing": "torch"}', '{"outcome": "fit"}'], 0, None, Forks("fit")),
        (['{"importing": "torch"}'], -4, None, Forks("ended", "torch", "signal 4")),
        (['{"importing": "torch"}'], 3, None, Forks("ended", "torch", "exit status 3")),
        (['{"importing": "torch"}', '{"importing": "mine"}'], -9, 2.0, Forks("hung", "mine", "2 seconds")),
        ([], 1, None, Forks("ended", "pytest_accel", "exit status 1")),
        # Text that a `sitecustomize` module prints.
        (["hello", "[]", '{"a": 1}', '{"importing": "torch"}', '{"outcome": "fit"}'], 0, None, Forks("fit")),
    ],
)
def test_the_output_of_the_probe_process_is_interpreted(
    lines: list[str], status: int, hung: float | None, forks: Forks
) -> None:
    assert conclude(lines, status, hung) == forks


@pytest.mark.parametrize(
    ("source", "forks"),
    [
        ("print('hello')", Forks("fit")),
        (
            "import threading\nstop = threading.Event()\nthreading.Thread(target=stop.wait).start()",
            Forks("unfit", "mine", "starts threads"),
        ),
        pytest.param("raise RuntimeError('no')", Forks("failed", "mine", "RuntimeError: no"), marks=pytest.mark.long),
        ("import os\nos.kill(os.getpid(), 6)", Forks("ended", "mine", "signal 6")),
    ],
)
def test_the_probe_process_finds_modules_that_prevent_forking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, forks: Forks
) -> None:
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(ROOT)
    assert try_forks(["mine"]) == forks


def test_a_probe_process_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert try_forks([], timeout=0.5) == Forks("hung", "pytest_accel", "0.5 seconds")


def test_nvidia_gpus_are_counted_on_the_pci_bus(tmp_path: Path) -> None:
    devices = {"0000:01:00.0": ("0x10de", "0x030200"), "0000:02:00.0": ("0x10de", "0x030000")}
    devices |= {"0000:02:00.1": ("0x10de", "0x040300"), "0000:00:02.0": ("0x8086", "0x030000")}
    for address, (vendor, kind) in devices.items():
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert look_for_nvidia(tmp_path).cards == 2


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/me/a\\040b tmpfs rw 0 0
overlay /home/me/a\\040b overlay rw 0 0
/dev/sdb1 /homely xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/tmp/x", "ext4"),
        ("/home", "nfs4"),
        ("/home/me", "nfs4"),
        ("/home/me/a b/c", "overlay"),
        ("/homely", "xfs"),
    ],
)
def test_the_file_system_of_a_path_is_found(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind
    assert filesystem_of(Path(path), "") is None


def test_lock_folders_are_checked_and_not_created(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"x {tmp_path} nfs rw 0 0\n")
    folder = tmp_path / "locks"
    assert look_at_locks(folder, mounts) == LockFolder(str(folder), False, None, "nfs")
    assert not folder.exists()
    folder.mkdir()
    folder.chmod(0o755)
    assert look_at_locks(folder, mounts) == LockFolder(str(folder), True, None, "nfs")
    folder.chmod(0o777)
    assert (look_at_locks(folder, mounts).problem or "").startswith("has mode 0777: other users may write to it")
    (tmp_path / "link").symlink_to(folder)
    assert look_at_locks(tmp_path / "link", mounts).problem == "is not a directory (symbolic links are not allowed)"
    (tmp_path / "file").touch()
    assert look_at_locks(tmp_path / "file", mounts).problem == "is not a directory"
    for parent in (tmp_path / "absent", tmp_path / "file"):
        why = f"cannot be created, because {parent} is not a directory that this user may write to"
        assert look_at_locks(parent / "locks", mounts).problem == why


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor without the inherited masks."""
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
    return subprocess.run(
        [sys.executable, "-m", "pytest_accel", "doctor", *arguments],
        cwd=ROOT,
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def not_ok(done: subprocess.CompletedProcess[str], *names: str) -> dict[str, tuple[str, str]]:
    """Return state and text of the findings of the checks `names` that are not ok."""
    findings = json.loads(done.stdout)["findings"]
    return {
        one["check"]: (one["state"], one["what"]) for one in findings if one["check"] in names and one["state"] != "ok"
    }


def test_the_command_finds_no_problem_on_this_machine_with_simulated_devices() -> None:
    done = run("--accel", "sim:4")
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())  # Lines are wrapped, where depends on the length of paths.
    assert "ok devices the session has sim: 4 x sim ok" in text
    assert "ok forks what ranks are forked from has one thread" in text
    assert ("can be used" if Path(os.environ[VARIABLE]).exists() else "created by the first session") in text
    assert done.stderr == ""


def test_a_problem_is_printed_and_sets_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("in the way")
    (tmp_path / "starts.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    published = {"broken": "toy = nothing_there:make", "one": "twin = os:getcwd", "other": "twin = os:getcwd"}
    for package, points in published.items():
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[pytest_accel.vendors]\n{points}\n")
    done = run(
        "--json",
        "--accel=sim:2",
        PYTEST_ACCEL_LOCK_DIR=str(tmp_path / "locks"),
        PYTEST_ACCEL_PRELOAD="starts",
        PYTHONPATH=str(tmp_path),
        SIM_VISIBLE_DEVICES="7",
        OMPI_COMM_WORLD_RANK="1",
        OMPI_COMM_WORLD_SIZE="2",
        OMPI_COMM_WORLD_LOCAL_RANK="0",
        OMPI_COMM_WORLD_LOCAL_SIZE="1",
        MASTER_ADDR="127.0.1.1",
        MASTER_PORT="29511",
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["problems"] >= 4  # In a container without a network, there is one more.
    assert not_ok(done, "locks", "forks", "masks") == {
        "locks": ("problem", f"{tmp_path / 'locks'} is not a directory: no device can be leased"),
        "forks": ("problem", "importing starts starts threads: ranks that are forked after that may hang"),
        "masks": ("problem", "SIM_VISIBLE_DEVICES='7' leaves none of 2 (sim)"),
    }
    findings = json.loads(done.stdout)["findings"]
    results = {(one["state"], one["what"]) for one in findings}
    meeting = "127.0.1.1 is loopback, at which other machines reach themselves"
    assert results >= {
        ("ok", "rank 1 of 2 under mpirun, 1 on this machine"),
        ("problem", f"MASTER_ADDR='127.0.1.1' MASTER_PORT='29511': {meeting}"),
    }
    devices = [one for one in findings if one["check"] == "devices"]
    broken = [one for one in devices if one["what"].startswith("kind ")]
    assert [one["state"] for one in broken] == ["note", "note"]
    assert "kind 'toy' of broken 1.0 cannot be loaded: ModuleNotFoundError" in broken[0]["what"]
    assert re.match(r"kind 'twin' of (one 1.0 and of other|other 1.0 and of one) 1.0: it can be", broken[1]["what"])


def test_invalid_settings_are_usage_errors() -> None:
    for done, error in (
        (run("--accel", "sim:0"), "sim:0"),
        (run("--accel", "sim:2", "--accel-ids", "5"), "'5' names no device"),
        (run("--accel", "sim:missing.toml"), "sim topology missing.toml: cannot be read"),
        (run(PYTEST_ACCEL_TIMEOUT="never"), "environment variable PYTEST_ACCEL_TIMEOUT: must be"),
    ):
        assert done.returncode == 2
        assert error in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
