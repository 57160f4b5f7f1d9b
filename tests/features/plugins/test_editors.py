"""Tests of sessions that an editor debugs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from io import BufferedRWPair
from pathlib import Path
from typing import IO, Any

from tests.deadline import TIMEOUT, scaled
from tests.features.conftest import Suite
from tests.features.plugins.conftest import needs

_DEBUGGED = """import pytest

@pytest.mark.distributed(2, kind="cpu")
def test_debugged(rank, gather):
    value = 40 + rank
    assert gather(value) == [40, 41]
"""


class Debugger:
    """A session of the Debug Adapter Protocol with one process, like that of an editor."""

    def __init__(self, reader: IO[bytes] | BufferedRWPair, writer: IO[bytes] | BufferedRWPair) -> None:
        self.exit: int | None = None
        self.stops: list[tuple[int, str]] = []
        """Line and value of the variable `value` at each stop, in this session and those of subprocesses."""
        self._reader, self._writer = reader, writer
        self._sent = 0
        self._unhandled: list[dict[str, Any]] = []
        self._subprocesses: list[threading.Thread] = []

    def debug(self, file: Path, request: str, arguments: dict[str, object]) -> None:
        """Debug a process until it ends, with a breakpoint in line 6 of `file` on rank 1.

        `request` is "launch" or "attach".
        """
        self._response(self._send("initialize", {"adapterID": "test"}))
        self._send(request, arguments)
        self._receive(event="initialized")
        place = {"line": 6, "condition": "rank == 1"}
        self._response(self._send("setBreakpoints", {"source": {"path": str(file)}, "breakpoints": [place]}))
        self._response(self._send("configurationDone", {}))
        while (message := self._receive(type="event"))["event"] != "terminated":
            body = message.get("body", {})
            match message["event"]:
                case "stopped":
                    trace = self._response(self._send("stackTrace", {"threadId": body["threadId"]}))
                    frame = trace["stackFrames"][0]
                    number = self._send("evaluate", {"expression": "value", "frameId": frame["id"]})
                    self.stops.append((frame["line"], self._response(number)["result"]))
                    self._response(self._send("continue", {"threadId": body["threadId"]}))
                case "debugpyAttach":
                    thread = threading.Thread(target=self._debug_subprocess, args=(file, body), daemon=True)
                    self._subprocesses.append(thread)
                    thread.start()
                case "exited":
                    self.exit = body["exitCode"]
        for thread in self._subprocesses:
            thread.join(scaled(TIMEOUT))

    def _debug_subprocess(self, file: Path, arguments: dict[str, Any]) -> None:
        address = ("127.0.0.1", arguments["connect"]["port"])
        with socket.create_connection(address, scaled(TIMEOUT)) as connection, connection.makefile("rwb") as stream:
            debugger = Debugger(stream, stream)
            debugger.stops = self.stops
            debugger.debug(file, "attach", arguments)

    def _send(self, command: str, arguments: dict[str, object]) -> int:
        self._sent += 1
        request = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        data = json.dumps(request).encode()
        self._writer.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        self._writer.flush()
        return self._sent

    def _response(self, number: int) -> Any:
        response = self._receive(type="response", request_seq=number)
        assert response["success"], response
        return response.get("body")

    def _receive(self, **fields: object) -> dict[str, Any]:
        """Return the first message with `fields`, and keep the others. At the end of the connection, `terminated`."""
        for message in self._unhandled:
            if {name: message.get(name) for name in fields} == fields:
                self._unhandled.remove(message)
                return message
        while True:
            length = 0
            while header := self._reader.readline().strip():
                length = int(header.rpartition(b":")[2])
            message = json.loads(self._reader.read(length)) if length else {"type": "event", "event": "terminated"}
            if {name: message.get(name) for name in fields} == fields:
                return message
            assert length, "the debugged process has closed the connection too early"
            self._unhandled.append(message)


@needs("debugpy")
def test_breakpoints_of_an_editor_stop_ranks(suite: Suite) -> None:
    """VS Code's debugger attaches to each process that the debugged process starts, and so to each rank."""
    file = suite.write("test_it.py", _DEBUGGED)
    command = [sys.executable, "-m", "debugpy.adapter"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=suite.path) as adapter:
        watchdog = threading.Timer(scaled(2 * TIMEOUT), adapter.kill)
        watchdog.start()
        assert adapter.stdin is not None
        assert adapter.stdout is not None
        debugger = Debugger(adapter.stdout, adapter.stdin)
        started = {"module": "pytest", "args": ["-p", "accel", "-v"], "cwd": str(suite.path)}
        debugger.debug(file, "launch", {**started, "console": "internalConsole", "subProcess": True})
        watchdog.cancel()
        adapter.kill()
    assert debugger.stops == [(6, "41")]
    assert debugger.exit == 0
