"""Tests of ``python -m pytest_accel info``: its table of the devices, and the same as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.features.doctor.hooks import look, table
from pytest_accel.hardware.inventory import Machine
from tests.features.doctor.conftest import ROOT, run
from tests.session_server import WITHOUT_TORCH

HOLD = """
import sys
from pathlib import Path
from pytest_accel.leases.demand import Holder
from pytest_accel.leases.locks import SessionLocks
locks = SessionLocks(Path(sys.argv[1]))
assert locks.lock("sim-1")
locks.describe("sim-1", Holder.here("killed"))
print("held", flush=True)
sys.stdin.readline()
"""

TOPOLOGY = """
[[device]]
name = "Big"
memory = "80GiB"
capability = "9.0"
pci = "0000:02:00.0"
numa = 1
links = [{to = 1, via = "nvlink"}, {to = 2, via = "pcie"}]
[[device]]
name = "Small"
pci = "0000:01:00.0"
[[device]]
name = "Small"
pci = "0000:03:00.0"
"""


def read_json(*arguments: str, **environ: str) -> dict[str, Any]:
    """Return the document that the command prints with ``--json``."""
    done = run("--json", *arguments, **environ)
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide the path of a lock folder that does not exist yet."""
    return tmp_path / "own-locks"


@pytest.fixture
def holder(folder: Path) -> Iterator[int]:
    """Provide the pid of a session that holds sim-1 for the test "killed"."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.kill()


def test_the_table_has_the_facts_of_each_device(tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text(TOPOLOGY)
    machine = f"--accel=sim:{tmp_path / 'machine.toml'}"
    done = run("info", machine)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    assert lines[0] == ["accel: sim, 3 devices: Big (80 GiB), 2 x Small, order fastest"]
    headers = ["#", "device", "id", "kind", "name", "memory", "free", "capability", "pci", "numa", "links"]
    assert lines[1] == [*headers, "held by", "used by"]
    assert lines[2][:10] == ["0", "cpu", "sim-0", "sim", "Big", "80 GiB", "80 GiB", "9.0", "0000:02:00.0", "1"]
    assert lines[2][10:] == ["nvlink: 1; pcie: 2", "-", "-"]
    assert lines[3] == ["1", "cpu", "sim-1", "sim", "Small", "-", "-", "-", "0000:01:00.0", "-", "nvlink: 0", "-", "-"]
    assert lines[4][10] == "pcie: 0"
    assert lines[5:] == [["mask of a process that sees all of them: SIM_VISIBLE_DEVICES=sim-0,sim-1,sim-2"]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "--accel-info", machine]
    shown = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert done.stdout in shown.stdout, "pytest must show the same table"


def test_settings_are_read_as_in_pytest() -> None:
    few = read_json("--accel", "sim:4", "--accel-ids", "3,0", "--accel-order", "3", PYTEST_ACCEL="sim:2")
    assert [one["id"] for one in few["devices"]] == ["sim-3", "sim-0"]
    assert (few["order"], few["notes"]) == ("3", ["--accel-ids 3,0 leaves 2 of 4"])
    none = read_json("--accel", "none")
    assert (none["kind"], none["devices"], none["mask"]) == ("none", [], {})
    masked = read_json("--accel", "sim:3", SIM_VISIBLE_DEVICES="2,0")
    assert [one["id"] for one in masked["devices"]] == ["sim-0", "sim-2"]
    assert (masked["present"], masked["visible"], masked["inherited"]) == (3, 2, {"SIM_VISIBLE_DEVICES": "2,0"})


def test_the_keys_are_those_of_the_documentation() -> None:
    page = (ROOT / "docs" / "reference" / "command.md").read_text(encoding="utf-8")
    (_, info, doctor) = re.split(r"^## `.*--json`.*$", page, flags=re.MULTILINE)
    keys = re.findall(r"^\| `(\w+)` \|", info, re.MULTILINE)
    document = read_json("--accel", "cpu:1")
    assert keys == [*document, *document["devices"][0]]
    document = json.loads(run("doctor", "--json", "--accel", "cpu:1", PYTHONPATH=WITHOUT_TORCH).stdout)
    keys = re.findall(r"^\| `(\w+)` \|", doctor, re.MULTILINE)
    assert keys[: len(document) + 4] == [*document, *document["findings"][0]]
    assert keys[len(document) + 4 :] == list(dict.fromkeys(one["check"] for one in document["findings"]))


def test_the_holder_of_a_lease_is_shown(folder: Path, holder: int) -> None:
    before = time.time()
    document = read_json("--accel", "sim:3,shared", PYTEST_ACCEL_LOCK_DIR=str(folder))
    first, held, last = (one["holder"] for one in document["devices"])
    assert first is last is None
    assert (held["pid"], held["test"]) == (holder, "killed")
    assert 0 < held["since"] < before


def test_the_commands_do_not_change_the_lock_folder(folder: Path, holder: int) -> None:
    def state() -> dict[str, tuple[bytes, int]]:
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}

    before, variables = state(), {"PYTEST_ACCEL_LOCK_DIR": str(folder), "PYTHONPATH": WITHOUT_TORCH}
    for command in ("info", "doctor"):
        assert run(command, "--accel", "sim:2,shared", **variables).returncode == 0
    assert state() == before != {}


def test_an_unusable_lock_folder_is_reported(folder: Path) -> None:
    folder.write_text("in the way")
    (note,) = read_json("--accel", "sim:1,shared", PYTEST_ACCEL_LOCK_DIR=str(folder))["notes"]
    assert note.startswith("the holders of leases are not known: the folder for device locks cannot")
    assert f"{folder}/pytest-accel-sim-0.lock: Not a directory" in note


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("inform", "no command 'inform'; allowed are durations, trace, "),
        ("--accel sim:none", "--accel sim:none: allowed are sim:N, with N from 1, and sim:FILE.toml"),
        ("--accel sim:missing.toml", "sim topology missing.toml: [Errno 2] No such file or directory"),
        ("--accel sim:2 --accel-ids 2", "--accel-ids: '2' names no device; allowed are 0 (sim-0)"),
        ("PYTEST_ACCEL_BUSY=no", "environment variable PYTEST_ACCEL_BUSY: must be ignore, skip or wait, got 'no'"),
    ],
)
def test_invalid_settings_are_usage_errors(arguments: str, text: str) -> None:
    name, _, value = arguments.partition("=")
    done = run(**{name: value}) if value else run(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_health_and_unknown_holders_and_links_to_other_machines_are_shown() -> None:
    machine = Machine("sim:2")
    document = look(machine)
    first, second = document["devices"]
    first["links"] = [
        {"peer": "sim-1", "number": 1, "via": "nvlink", "count": 2},
        {"peer": "gone", "number": None, "via": "nvlink", "count": 1},
        {"peer": "sim-1", "number": 1, "via": "numa", "count": 1},
    ]
    first["holder"] = {"pid": 0, "user": "unknown", "test": "an unknown session", "since": 0.0}
    first["health"] = {"state": "busy", "reason": "is used by pid 7 (x, 2 GiB)"}
    second["health"] = {"state": "sick", "reason": "is ill"}
    document["notes"].append("a note")
    lines = table(machine, document).splitlines()
    assert lines[2].endswith("  numa: 1; nvlink: 1  an unknown session  pid 7 (x, 2 GiB)")
    assert lines[3].endswith("  sick: is ill")
    assert lines[-1] == "a note"
