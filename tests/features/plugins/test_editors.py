"""Tests of sessions that an editor starts, stops and debugs.

The environment variable VSCODE_PYTHON_FILES names the folder `python_files` of VS Code's Python extension. The test of
its plugin `vscode_pytest`, which is not on PyPI, needs this folder. Other tests use a plugin with the same hooks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedRWPair
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from tests.deadline import Deadline, scaled
from tests.features.plugins.conftest import needs
from tests.features.plugins.test_reporters import VSCODE_PLUGIN

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_TIMEOUT = 60.0
"""Seconds on an idle machine after which a test stops waiting and fails; longer on a busy one."""
_VSCODE_FOLDER = os.environ.get("VSCODE_PYTHON_FILES")
_STOPPED = """
    import time
    from pathlib import Path

    import pytest

    pytestmark = pytest.mark.distributed(2, kind="cpu")


    def test_passes():
        pass


    def test_fails(rank):
        assert rank == 2


    def test_skips():
        pytest.skip("not today")


    def test_waits(rank):
        Path(f"waits.{rank}").touch()
        time.sleep(600)
    """
_DEBUGGED = """
    import pytest


    @pytest.mark.distributed(2, kind="cpu")
    def test_debugged(rank, gather):
        value = 40 + rank
        assert gather(value) == [40, 41]  # Break here.
    """
_ATTACHED = """
    import os

    import pytest


    @pytest.mark.distributed(2, kind="cpu")
    def test_attached(rank, gather):
        value = 40 + rank
        if rank == 1:
            import debugpy

            _, port = debugpy.listen(0)
            with open("port.part", "w") as file:
                file.write(str(port))
            os.rename("port.part", "port")
            debugpy.wait_for_client()
            debugpy.breakpoint()
        assert gather(value) == [40, 41]  # Break here.
    """


def _wait_for(what: str, condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true; fail with `what` after a timeout."""
    deadline = Deadline(_TIMEOUT)
    while not condition():
        assert not deadline.expired, f"timed out waiting for {what}"
        time.sleep(0.02)


def _parse_results(sent: bytes) -> dict[str, str]:
    """Return the outcome of each test by its name, from the messages of either plugin."""
    text = sent.decode()
    rpc = re.findall(r'"test": "[^"]*::(\w+)", "outcome": "(\w+)"', text)
    return dict(rpc or re.findall(r'^\["[^"]*::(\w+)", "(\w+)"', text, re.MULTILINE))


@pytest.mark.parametrize(
    "plugin",
    [
        "same hooks",
        pytest.param(
            "VS Code's", marks=pytest.mark.skipif(_VSCODE_FOLDER is None, reason="VSCODE_PYTHON_FILES is not set")
        ),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_results_reach_an_editor_that_stops_the_session(suite: Suite, plugin: str, number: signal.Signals) -> None:
    """The editor reads results from a pipe until end of file, so no rank may keep the pipe open."""
    suite.write("test_it.py", _STOPPED)
    if plugin == "same hooks":
        suite.write("vscode_pytest.py", VSCODE_PLUGIN)
    folder = str(suite.path) if plugin == "same hooks" else str(_VSCODE_FOLDER)
    os.mkfifo(suite.path / "pipe")
    sent: list[bytes] = []
    reader = threading.Thread(target=lambda: sent.append((suite.path / "pipe").read_bytes()), daemon=True)
    reader.start()
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "accel", "-p", "vscode_pytest", "--rootdir", str(suite.path)],
        cwd=suite.path,
        env={**os.environ, "PYTHONPATH": path, "TEST_RUN_PIPE": str(suite.path / "pipe")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as session:
        waits = [suite.path / f"waits.{rank}" for rank in (0, 1)]
        _wait_for("the last test", lambda: session.poll() is not None or all(map(Path.exists, waits)))
        session.send_signal(number)
        text, _ = session.communicate(timeout=scaled(_TIMEOUT))
    print(text)
    assert session.returncode == (2 if number == signal.SIGINT else -number)
    reader.join(scaled(_TIMEOUT))
    assert not reader.is_alive()
    results = _parse_results(sent[0])
    results.pop("test_waits", None)
    assert results == {"test_passes": "success", "test_fails": "failure", "test_skips": "skipped"}


_Stream = IO[bytes] | BufferedRWPair


def _is_response(message: dict[str, Any], number: int) -> bool:
    """Return whether `message` is the response to the request `number`."""
    return bool(message["type"] == "response" and message["request_seq"] == number)


class Debugger:
    """A session of the Debug Adapter Protocol with one process, like that of an editor."""

    def __init__(self, reader: _Stream, writer: _Stream, line: int) -> None:
        """Connect to an adapter by `reader` and `writer`; the breakpoint is in `line`, if `rank` is 1."""
        self.exit: int | None = None
        self.stops: list[tuple[int, str]] = []
        """Line and value of the variable `value` at each stop, in this session and those of subprocesses."""
        self.output = ""
        self._reader = reader
        self._writer = writer
        self._line = line
        self._sent = 0
        self._unhandled: list[dict[str, Any]] = []
        self._subprocesses: list[threading.Thread] = []

    def debug(self, file: Path, request: str, arguments: dict[str, object]) -> None:
        """Debug the process until it ends. `request` is "launch" or "attach"."""
        self._request("initialize", adapterID="test")
        number = self._send(request, arguments)
        started = self._receive(lambda message: message.get("event") == "initialized" or _is_response(message, number))
        assert started["type"] == "event", started
        place = {"line": self._line, "condition": "rank == 1"}
        self._request("setBreakpoints", source={"path": str(file)}, breakpoints=[place])
        self._request("configurationDone")
        while True:
            message = self._receive(lambda message: message["type"] == "event")
            body = message.get("body", {})
            match message["event"]:
                case "stopped":
                    frame = self._request("stackTrace", threadId=body["threadId"])["stackFrames"][0]
                    value = self._request("evaluate", expression="value", frameId=frame["id"])["result"]
                    self.stops.append((frame["line"], value))
                    self._request("continue", threadId=body["threadId"])
                case "debugpyAttach":
                    thread = threading.Thread(target=self._debug_subprocess, args=(file, body), daemon=True)
                    self._subprocesses.append(thread)
                    thread.start()
                case "output":
                    self.output += body["output"]
                case "exited":
                    self.exit = body["exitCode"]
                case "terminated":
                    break
        for thread in self._subprocesses:
            thread.join(scaled(_TIMEOUT))

    def _debug_subprocess(self, file: Path, arguments: dict[str, Any]) -> None:
        with connect(arguments["connect"]["port"], self._line) as debugger:
            debugger.stops = self.stops
            debugger.debug(file, "attach", arguments)

    def _send(self, command: str, arguments: dict[str, object]) -> int:
        self._sent += 1
        request = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        data = json.dumps(request).encode()
        self._writer.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        self._writer.flush()
        return self._sent

    def _request(self, command: str, **arguments: object) -> Any:
        number = self._send(command, arguments)
        response = self._receive(lambda message: _is_response(message, number))
        assert response["success"], response
        return response.get("body")

    def _receive(self, matches: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first message for which `matches` is true, and keep the others.

        At the end of the connection, the message is the event `terminated`.
        """
        for message in self._unhandled:
            if matches(message):
                self._unhandled.remove(message)
                return message
        while True:
            length = 0
            while header := self._reader.readline().strip():
                length = int(header.rpartition(b":")[2])
            message = json.loads(self._reader.read(length)) if length else {"type": "event", "event": "terminated"}
            if matches(message):
                return message
            assert length, "the debugged process has closed the connection too early"
            self._unhandled.append(message)


@contextmanager
def connect(port: int, line: int) -> Iterator[Debugger]:
    """Yield a debugger that is connected to the adapter at `port`."""
    with (
        socket.create_connection(("127.0.0.1", port), scaled(_TIMEOUT)) as connection,
        connection.makefile("rwb") as stream,
    ):
        yield Debugger(stream, stream, line)


def _breakpoint_line(text: str) -> int:
    """Return the number of the line of `text` with the comment "Break here"."""
    return next(number for number, line in enumerate(text.splitlines()) if "Break here" in line)


@needs("debugpy")
def test_breakpoints_of_an_editor_stop_ranks(suite: Suite) -> None:
    """VS Code's debugger attaches to each process that the debugged process starts, and so to each rank."""
    file = suite.write("test_it.py", _DEBUGGED.lstrip("\n"))
    line = _breakpoint_line(_DEBUGGED)
    command = [sys.executable, "-m", "debugpy.adapter"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=suite.path) as adapter:
        watchdog = threading.Timer(scaled(2 * _TIMEOUT), adapter.kill)
        watchdog.start()
        assert adapter.stdin is not None
        assert adapter.stdout is not None
        debugger = Debugger(adapter.stdout, adapter.stdin, line)
        started = {"module": "pytest", "args": ["-p", "accel", "-v"], "cwd": str(suite.path)}
        debugger.debug(file, "launch", {**started, "console": "internalConsole", "subProcess": True})
        watchdog.cancel()
        adapter.kill()
    print(debugger.output)
    assert debugger.stops == [(line, "41")]
    assert debugger.exit == 0
    assert "1 passed" in debugger.output


@needs("debugpy")
def test_debugger_attaches_to_one_rank(suite: Suite) -> None:
    file = suite.write("test_it.py", _ATTACHED.lstrip("\n"))
    line = _breakpoint_line(_ATTACHED)
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "accel", "-v"],
        cwd=suite.path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as session:
        port = suite.path / "port"
        _wait_for("the port", lambda: session.poll() is not None or port.exists())
        with connect(int(port.read_text()), line) as debugger:
            debugger.debug(file, "attach", {"justMyCode": True, "subProcess": True})
        text, _ = session.communicate(timeout=scaled(_TIMEOUT))
    print(text)
    assert debugger.stops == [(line, "41")]
    assert "1 passed" in text
    assert "rank 1 left process" in text  # debugpy's process that talks to the editor.
