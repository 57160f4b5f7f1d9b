"""Inspection of the ranks of a world from outside, on any machine.

Ranks on another machine are inspected there, in a thread of the agent that runs their fork server. The driver's request
and the answer go through the agent's TCP connection: the request names a method of :class:`MachineInspector`, whose
annotations are the types of its argument and of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from os import kill, unlink
from os.path import exists
from pathlib import Path
from time import sleep
from typing import Any, TypeVar, get_args, get_type_hints

from pytest_accel.core.clock import monotonic
from pytest_accel.core.processes import held_up, is_computing
from pytest_accel.core.session_folder import HEADING, LAST_PLACE_SIZE, RankFile, agent_path, rank_path
from pytest_accel.core.signals import FLIGHT_SIGNAL, INTERRUPT_SIGNAL, STACK_SIGNAL
from pytest_accel.core.truncation import read_end
from pytest_accel.diagnostics.python_stacks import FATAL, take_stacks
from pytest_accel.messages.connect import Inspection, call_agent
from pytest_accel.messages.flight_record import FlightRecord, from_json
from pytest_accel.messages.rank_messages import When
from pytest_accel.messages.struct_messages import decode, encode, from_builtins
from pytest_accel.messages.unix_sockets import Connection, limit_reads
from pytest_accel.messages.world_spec import WorldSpec

_TIMEOUT = 20
"""Seconds to wait for an answer. Stacks of a busy machine take the longest."""

_RECORD_TIMEOUT = 2.0
"""Seconds that a rank has to write its record."""
_LONGEST_WAIT = 10.0
"""Seconds that it has while it waits for a processor."""
CHUNK = 1 << 16
"""Maximum number of bytes that one read of a growing file returns."""
_CAPTURED: Mapping[RankFile, str] = {"output": "stdout", "records": "log"}
"""The files with what pytest captures, and pytest's names of it."""

Given = TypeVar("Given")
Found = TypeVar("Found")


class MachineInspector:
    """Inspects ranks of one world on its own machine.

    Each method takes a mapping by rank, and returns one. Ranks for which there is no result are left out.
    """

    def __init__(self, directory: str, world: int) -> None:
        self._directory = directory
        self._world = world

    def _path(self, rank: int, file: RankFile) -> str:
        return rank_path(self._directory, self._world, rank, file)

    def captured(self, phases: Mapping[int, When]) -> dict[int, list[tuple[str, str]]]:
        """Return the output of ranks in their present `phases`: headlines and texts, as in reports.

        If a file is kept or shown, the text is the rank's output in the whole test.
        """
        found: dict[int, list[tuple[str, str]]] = {rank: [] for rank in phases}
        for rank, when in phases.items():
            for file, name in _CAPTURED.items():
                with suppress(OSError):
                    _, heading, text = read_end(self._path(rank, file)).rpartition(HEADING)
                    if text := text.partition("\n")[2] if heading else text:
                        found[rank].append((f"Captured {name} {when}", text))
        return found

    def computing(self, pids: Mapping[int, int]) -> dict[int, bool]:
        """Return which processes are computing; see `is_computing`."""
        return {rank: is_computing(pid) for rank, pid in pids.items()}

    def held_up(self, pids: Mapping[int, int]) -> dict[int, bool]:
        """Return which processes wait for a processor or a disk; see `held_up`."""
        waiting = held_up(pids.values())
        return {rank: pid in waiting for rank, pid in pids.items()}

    def stacks(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Return the Python stacks; see `take_stacks`."""
        return take_stacks(dict(pids), {rank: self._path(rank, "stack") for rank in pids}, STACK_SIGNAL)

    def last_stacks(self, crashed: Mapping[int, bool]) -> dict[int, str]:
        """Return the stacks of ranks that have died; "" if there is none.

        If a rank has not `crashed`, its stack is the place of the last collective in its test.
        """
        found = {}
        for rank, has_crashed in crashed.items():
            with suppress(OSError), open(self._path(rank, "stack"), "rb") as file:
                place = file.read(LAST_PLACE_SIZE).partition(b"\0")[0].decode(errors="replace")
                _, *crash = file.read().decode(errors="replace").partition(FATAL)
                found[rank] = "".join(crash) if has_crashed else place
        return found

    def records(self, pids: Mapping[int, int]) -> dict[int, FlightRecord]:
        """Signal the ranks; return the records that they write within `_RECORD_TIMEOUT`.

        A rank that waits for a processor has longer. A record that cannot be read is empty.
        """
        paths: dict[int, str] = {}
        for rank, pid in pids.items():
            path = self._path(rank, "flight")
            Path(path).unlink(missing_ok=True)
            if FLIGHT_SIGNAL is not None:
                with suppress(ProcessLookupError):
                    kill(pid, FLIGHT_SIGNAL)
                    paths[rank] = path
        began = monotonic()
        while missing := [pids[rank] for rank, path in paths.items() if not exists(path)]:
            passed = monotonic() - began
            if passed >= _RECORD_TIMEOUT and (passed >= _LONGEST_WAIT or not held_up(missing)):
                break
            sleep(0.01)
        found: dict[int, FlightRecord] = {}
        for rank, path in paths.items():
            with suppress(OSError):
                found[rank] = from_json(Path(path).read_bytes())
        return found

    def interrupt(self, pids: Mapping[int, int]) -> dict[int, None]:
        """Have the ranks fail their test if their main threads run Python code."""
        if INTERRUPT_SIGNAL is not None:
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    kill(pid, INTERRUPT_SIGNAL)
        return {}

    def pieces(self, wanted: Mapping[int, tuple[RankFile, int]]) -> dict[int, bytes]:
        """Return the next piece of a file of each rank; `wanted` has the file and the offset."""
        found = {}
        for rank, (file, offset) in wanted.items():
            with suppress(OSError), open(self._path(rank, file), "rb", buffering=0) as opened:
                opened.seek(offset)
                found[rank] = opened.read(CHUNK)
        return found

    def remove_files(self, ranks: Mapping[int, None]) -> dict[int, None]:
        """Remove all files of ranks that have ended."""
        for rank in ranks:
            for file in get_args(RankFile):
                with suppress(OSError):
                    unlink(self._path(rank, file))
        return {}


_Method = Callable[[MachineInspector, Mapping[int, Any]], dict[int, Any]]


class WorldInspector:
    """Inspects all ranks of a world, each on its machine."""

    def __init__(self, directory: str, spec: WorldSpec) -> None:
        """`directory` is the session's folder on the driver's machine."""
        self._directory = directory
        self._spec = spec
        self._here = MachineInspector(directory, spec.world)

    def ask(
        self, method: Callable[[MachineInspector, Mapping[int, Given]], dict[int, Found]], given: Mapping[int, Given]
    ) -> dict[int, Found]:
        """Return the result of `method`, a method of :class:`MachineInspector`, for the ranks in `given`.

        All machines work in parallel.
        """
        remote: dict[int, dict[int, Given]] = {}
        for rank, value in given.items():
            if self._spec.is_remote(rank):
                remote.setdefault(self._spec.servers[rank], {})[rank] = value
        calls = [self._begin(server, method, part) for server, part in remote.items()]
        local = {rank: value for rank, value in given.items() if not self._spec.is_remote(rank)}
        found = method(self._here, local) if local else {}
        for call in calls:
            if call is not None:
                found |= _receive_answer(call, method)
        return found

    def stacks(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Return the Python stacks of the processes `pids`, by rank; see `python_stacks.take_stacks`."""
        return self.ask(MachineInspector.stacks, pids)

    def records(self, alive: Mapping[int, int]) -> dict[int, FlightRecord]:
        """Return the records of the `alive` ranks that have written one, without disturbing them.

        `alive` must include ranks that do not hang: these may not have reached a collective.
        """
        found = self.ask(MachineInspector.records, alive) if self._spec.key.grouped else {}
        return dict(sorted(found.items()))

    def remove_files(self) -> None:
        """Remove the files of the ranks, which have ended; do not wait for other machines."""
        ranks = dict.fromkeys(range(self._spec.ranks))
        self._here.remove_files(ranks)
        for server in {self._spec.servers[rank] for rank in ranks if self._spec.is_remote(rank)}:
            call = self._begin(server, MachineInspector.remove_files, ranks)
            if call is not None:
                call.close()

    def _begin(self, server: int, method: _Method, given: Mapping[int, Any]) -> Connection | None:
        try:
            request = Inspection(method.__name__, self._spec.world, given)
            call = call_agent(agent_path(self._directory, server), request)
        except OSError:
            return None
        limit_reads(call, _TIMEOUT)
        return Connection(call.detach())


def _receive_answer(call: Connection, method: _Method) -> dict[int, Any]:
    with call, suppress(EOFError, OSError):  # The other machine is lost; the agent's client reports that.
        found: dict[int, Any] = decode(call.recv_bytes(), get_type_hints(method)["return"])
        return found
    return {}


def answer(call: Connection, directory: str, request: Inspection) -> None:
    """Answer a request of the driver; called in a thread of an agent on another machine."""
    with call, suppress(EOFError, OSError):
        method: _Method = getattr(MachineInspector, request.method)
        form, _ = get_type_hints(method).values()
        given = from_builtins(request.given, form)
        call.send_bytes(encode(method(MachineInspector(directory, request.world), given)))
