"""Tests of the doctor's facts about launchers and the network."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core import launcher_env, reserved_port
from pytest_accel.features.doctor.network import look_at_launch, look_at_network
from tests.features.launchers.machines import ADDRESSES, NAMES, machines

_LOOK = """
import dataclasses, json
from pytest_accel.features.doctor.network import look_at_network
print(json.dumps(dataclasses.asdict(look_at_network())))
"""


def test_launchers_are_recognized_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launcher_env.variables_here(os.environ):
        monkeypatch.delenv(name)
    assert look_at_launch().launchers == ()
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "RANK": "3"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch = look_at_launch()
    assert (launch.launchers, launch.incomplete) == ((), ("mpirun", ("MPI_LOCALNRANKS",)))

    monkeypatch.setenv("MPI_LOCALNRANKS", "1")
    launch = look_at_launch()
    assert [process.about for process in launch.launchers] == ["mpirun, 2 ranks"]
    assert launch.joins_machines
    assert launch.variables == {**variables, "MPI_LOCALNRANKS": "1"}
    assert launch.installed.keys() == {"torchrun", "accelerate", "deepspeed", "ray", "mpirun", "srun"}
    assert (launch.installed["torchrun"] is None) == (find_spec("torch") is None)


def test_the_address_where_processes_meet_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(address: str, port: object) -> tuple[bool, str, str | None]:
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(port))
        found = look_at_network()
        return found.here, found.answer, found.no_port

    with reserved_port.hold() as held:
        number = held.getsockname()[1]
        assert look("127.0.0.1", number) == (True, "refused", None)
        with socket.create_server(("127.0.0.1", number)):
            assert look("127.0.0.1", number) == (True, "answers", None)
        with socket.socket() as bound:
            bound.bind(("", number))
            assert look("127.0.0.1", number) == (True, "refused", "Address already in use")
    for port in ("", "0", "65536", "http"):
        assert look("127.0.0.1", port) == (True, "", None)
    assert look("a name with spaces", 1234) == (False, "", None)


def test_the_route_to_another_machine_is_found(tmp_path: Path) -> None:
    with machines(tmp_path) as two, reserved_port.hold() as held:

        def look(address: str) -> dict[str, Any]:
            environment = {**os.environ, "MASTER_ADDR": address, "MASTER_PORT": str(held.getsockname()[1])}
            command = [*two.on(1), sys.executable, "-c", _LOOK]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found: dict[str, Any] = json.loads(done.stdout)
            return found

        near, far = ADDRESSES
        own = {"name": NAMES[1], "named": [far], "address": far, "interface": two.links[1]}
        reached = look(NAMES[0])
        assert reached.items() >= {**own, "meeting": [near], "here": False, "answer": "refused"}.items()
        assert look("10.78.0.1").items() >= {**own, "here": False, "answer": "Network is unreachable"}.items()
        assert look(NAMES[1]).items() >= {**own, "meeting": [far], "here": True}.items()
