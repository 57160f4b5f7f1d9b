"""An agent's end of its connection to the driver on another machine."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from traceback import format_exc
from typing import TypeVar

import zmq
from zmq.utils import z85

from pytest_accel.core import prctl, threads
from pytest_accel.core.clock import monotonic
from pytest_accel.core.log import step, step_once
from pytest_accel.core.paths import socket_path
from pytest_accel.diagnostics.inspector import answer
from pytest_accel.features.launchers.agent_messages import ClockReading, Ending, Hello, Meeting, ToAgent
from pytest_accel.features.launchers.machine_link import HANDSHAKE_TIMEOUT, STRUCT, MachineLink
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import InspectorTarget, RankTarget, ServerTarget, Target
from pytest_accel.messages.struct_messages import LENGTH, decode, encode
from pytest_accel.messages.unix_sockets import Connection

_CALL_TIMEOUT = 3.0
"""Seconds that an attempt to connect may take."""
_RETRY_INTERVAL = 0.1
"""Seconds between two attempts."""
_REFUSED_TIMEOUT = 5.0
"""Seconds for which to retry while a process with another secret listens at the driver's address."""
_CLOCK_ROUNDS = 5
"""Number of rounds in which the clocks are compared."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
Greeting = TypeVar("Greeting", Meeting, ClockReading)


class WrongSecret(ConnectionError):
    """The process that listens did not accept this one: its secret or its job is another, or it is no driver."""


class AgentLink(MachineLink):
    """The agent's end of its connection to the driver. The agent owns it, and is its `AgentTransport`."""

    remote = True

    def __init__(self, address: str, port: int, key: bytes) -> None:
        """Connect to the driver, whose private key is `key`."""
        super().__init__(zmq.DEALER, zmq.EVENT_DISCONNECTED | _FAILED)
        self.clock = 0.0
        """Seconds to add to this machine's clock to get the driver's."""
        self._greeting: asyncio.Queue[tuple[int, bytes] | ConnectionError] = asyncio.Queue()
        """The messages until :meth:`run` is called, or the end of the connection."""
        self._handle: Callable[[object], None] | None = None
        self._end: asyncio.Future[str | None] = self._loop.create_future()
        """The result of :meth:`run`."""
        self._numbers: set[int] = set()
        """The streams that the driver has opened and has not ended."""
        self._directory: str | None = None
        """The folder in which the ranks of the current fork server listen."""
        self._driver_end: socket.socket | None = None
        """The driver's end of the connection to the fork server, until the driver opens its stream."""
        public, private = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(key)))
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        self._socket.connect(f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}")

    def greet(self, hello: Hello, timeout: float) -> bool:
        """Greet the driver, and return whether this connection is to be served.

        Raise ConnectionError if the connection ends, and asyncio.TimeoutError after `timeout` seconds.
        """
        return self._loop.run_until_complete(asyncio.wait_for(self._greet(hello), timeout))

    async def _greet(self, hello: Hello) -> bool:
        rounds = []
        for _ in range(_CLOCK_ROUNDS):
            began = monotonic()
            self._send(ClockReading(began))
            there = await self._expect(ClockReading)
            took = monotonic() - began
            # The driver read its clock between sending and receiving, so the shortest round gives the smallest error.
            rounds.append((took, there.seconds - began - took / 2))
        self.clock = min(rounds)[1]
        self._send(hello)
        return (await self._expect(Meeting)).remote

    async def _expect(self, form: type[Greeting]) -> Greeting:
        received = await self._greeting.get()
        if isinstance(received, ConnectionError):
            raise received
        message: Greeting = decode(received[1], form)
        return message

    def send(self, message: object) -> None:
        self.post(partial(self._send, message))

    def _send(self, message: object) -> None:
        self.put([STRUCT, encode(message)])

    def run(self, handle: Callable[[object], None]) -> str | None:
        self._handle = handle
        while not self._greeting.empty():
            received = self._greeting.get_nowait()
            if isinstance(received, ConnectionError):
                return None  # The driver reports it.
            self._dispatch(*received)
        return self._loop.run_until_complete(self._end)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        def on_ready() -> None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            call()

        self._loop.add_reader(descriptor, on_ready)

    def connect_server(self, directory: str) -> socket.socket:
        self._directory = directory
        self._driver_end, server_end = socket.socketpair()
        return server_end

    def expect_exit(self, driver: int, timeout: float) -> None:
        self._send(Ending())
        self._loop.call_later(timeout, self._finish, None)  # The driver's exit ends the connection.

    def close(self) -> None:
        self._end_loop()
        self._close_socket()
        if self._driver_end is not None:
            self._driver_end.close()

    def _finish(self, why: str | None) -> None:
        if not self._end.done():
            self._end.set_result(why)

    def _on_message(self, parts: list[zmq.Frame]) -> None:
        number, data = int.from_bytes(parts[0].bytes, "big"), parts[1].bytes
        if not number and not data:
            self.put([STRUCT, b""])
        elif self._handle is None:
            self._greeting.put_nowait((number, data))
        else:
            self._dispatch(number, data)

    def _dispatch(self, number: int, data: bytes) -> None:
        assert self._handle is not None
        try:
            if number:
                self._take_stream(number, data)
            else:
                self._handle(decode(data, ToAgent))
        except Exception:
            self._finish(f"an error at this end of the connection to it:\n{format_exc()}")

    def _on_event(self, event: int, value: int) -> None:
        error = WrongSecret if event & _FAILED else ConnectionResetError
        self._greeting.put_nowait(error("has closed the connection"))
        self._finish(None)  # The driver reports it.

    def _take_stream(self, number: int, data: bytes) -> None:
        if not data:
            self._numbers.discard(number)
        elif number not in self._numbers:
            self._numbers.add(number)
            end = LENGTH.size + int.from_bytes(data[: LENGTH.size], "big")
            try:
                self._open_target(number, decode(data[LENGTH.size : end], Target))
            except (OSError, ValueError):  # There is no such target.
                self._put_stream(b"", number, b"")
            data = data[end:]
            if not data:
                return
        self._take(b"", number, data)

    def _open_target(self, number: int, target: Target) -> None:
        """Open the stream to `target`; raise OSError if there is none."""
        if isinstance(target, ServerTarget) and self._driver_end is not None:
            end, self._driver_end = self._driver_end, None
            self.open_stream(b"", number, end)
        elif isinstance(target, InspectorTarget) and self._directory is not None:
            ours, theirs = socket.socketpair()
            threads.start(answer, "accel-inspector", Connection(theirs.detach()), self._directory)
            self.open_stream(b"", number, ours)
        elif isinstance(target, RankTarget) and self._directory is not None:
            path = socket_path(self._directory, target.world, target.rank)
            self.open_stream(b"", number, unix_sockets.connect(path), prctl.end_of(target.pid))
        else:
            raise FileNotFoundError(target)


def call(
    addresses: Sequence[str], port: int, key: bytes, hello: Hello, timeout: float, driver: str
) -> AgentLink | None:
    """Connect to the driver at one of `addresses`; return None if it does not want this connection.

    `driver` is its name in the log. Retry for `timeout` seconds, then raise ConnectionError with the reason for each
    address. If a process that listens there refuses the connection for some seconds, raise :class:`WrongSecret`.
    """
    deadline = monotonic() + timeout
    refused_since: float | None = None
    errors: dict[str, str] = {}
    seen: set[str] = set()
    while monotonic() < deadline:
        for address in addresses:
            try:
                # zmq does not tell why it cannot connect.
                with socket.create_connection((address, port), _CALL_TIMEOUT) as probe:
                    numeric = str(probe.getpeername()[0])
            except (OSError, ValueError) as error:  # ValueError: the address cannot be a host's name.
                errors[address] = str(error)
                step_once(seen, "cannot connect to %s at %s, port %d: %s", driver, address, port, error)
                continue
            link = AgentLink(numeric, port, key)
            try:
                wanted = link.greet(hello, min(HANDSHAKE_TIMEOUT, deadline - monotonic()))
            except (OSError, ValueError, asyncio.TimeoutError) as error:
                link.close()
                errors[address] = f"the process that listens there {str(error) or 'does not answer'}"
                step_once(seen, "what listens at %s, port %d, is not %s of this job: %r", address, port, driver, error)
                if isinstance(error, WrongSecret):
                    refused_since = refused_since or monotonic()
                    if monotonic() >= refused_since + _REFUSED_TIMEOUT:
                        raise
                continue
            step("is connected to %s at %s, port %d", driver, address, port)
            if wanted:
                return link
            link.close()
            return None
        time.sleep(_RETRY_INTERVAL)
    raise ConnectionError("; ".join(f"{address}: {why}" for address, why in errors.items()))
