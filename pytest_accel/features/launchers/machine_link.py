"""Connections between the driver and the agents of other machines, over zmq, encrypted and authenticated by CURVE.

The driver listens with one ROUTER for all agents, and each agent connects a DEALER to it. The driver's key pair follows
from the job's secret (`job_secret`), and its public key is never sent. The first message of an agent's handshake must
be encrypted for that key, and only its owner can answer. So each end has proved that it knows the secret before either
reads a message. zmq itself closes connections that are slow, half open or from another program.

A message is a number and bytes. The number 0 is for structs, and for pings, which are empty. Every other number is a
stream, which the driver opens and which carries the bytes of a local socket at each end: the first bytes name its
target, and a message without bytes ends it.

The kernel detects that the other machine is unreachable (tcp(7): SO_KEEPALIVE, TCP_USER_TIMEOUT). zmq's heartbeats were
rejected: a process that is stopped for a while does not answer them, and would count as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from traceback import format_exc
from typing import Any, TypeVar

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pytest_accel.core import prctl, threads
from pytest_accel.core.clock import monotonic
from pytest_accel.core.log import step, step_once
from pytest_accel.core.paths import socket_path
from pytest_accel.diagnostics.inspector import answer
from pytest_accel.features.launchers.agent_messages import ClockReading, Ending, Hello, Meeting, ToAgent, ToDriver
from pytest_accel.features.launchers.remote_agent import RemoteAgent
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import InspectorTarget, RankTarget, ServerTarget, Target
from pytest_accel.messages.struct_messages import LENGTH, decode, encode
from pytest_accel.messages.unix_sockets import Connection

SILENCE = 10.0
"""Seconds after which a machine that does not answer counts as lost."""
_PROBE = 2
"""Seconds between two probes of the kernel to a silent machine."""
_PING_INTERVAL = 0.25
"""Seconds between two pings of the driver to each agent: zmq refuses to send to an agent that is gone. A launcher that
ends the job gives rank 0 less than a second to name the process that was lost."""
_HANDSHAKE_TIMEOUT = 5.0
"""Seconds that a caller has to prove that it knows the secret, and the driver to answer a greeting."""
_LONGEST = 1 << 24
"""Maximum number of bytes in a message; command lines in a greeting may be long."""
_CHUNK = 1 << 16
"""Maximum number of bytes of a stream in one message."""
_CALL_TIMEOUT = 3.0
"""Seconds that an attempt to connect may take."""
_RETRY_INTERVAL = 0.1
"""Seconds between two attempts."""
_REFUSED_TIMEOUT = 5.0
"""Seconds for which to retry while a process with another secret listens at the driver's address."""
_CLOCK_ROUNDS = 5
"""Number of rounds in which the clocks are compared."""
_WRONG_KEY = 0x11000001
"""The value of zmq's event if a handshake cannot be decrypted (``ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC``)."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
Greeting = TypeVar("Greeting", Meeting, ClockReading)


class WrongSecret(ConnectionError):
    """The process that listens did not accept this one: its secret or its job is another, or it is no driver."""


class _Link:
    """One end of the connections: a zmq socket with its own context, the loop of one thread, and the open streams."""

    def __init__(self, kind: int, events: int) -> None:
        """`events` are the events of the socket that :meth:`_on_event` gets (zmq_socket_monitor(3))."""
        self._loop = asyncio.SelectorEventLoop()
        self._inboxes: dict[tuple[bytes, int], asyncio.Queue[bytes]] = {}
        """The data of each stream that has not been written to its socket, by peer and number. It is not bounded, since
        a slow reader must not block the others; senders truncate everything that they send to a driver."""
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        options = {
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            zmq.SNDHWM: 0,  # Messages wait in memory: no call blocks, and no message is dropped.
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: _LONGEST,
            zmq.HANDSHAKE_IVL: int(_HANDSHAKE_TIMEOUT * 1000),
            zmq.RECONNECT_IVL: -1,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: _PROBE,
            zmq.TCP_KEEPALIVE_INTVL: _PROBE,
            zmq.TCP_KEEPALIVE_CNT: int(SILENCE / _PROBE) - 1,
        }
        if sys.platform == "linux":
            options[zmq.TCP_MAXRT] = int(SILENCE * 1000)
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(events)
        for end, take in ((self._monitor, self._take_events), (self._socket, self._receive)):
            # The descriptor of a zmq socket becomes readable only for what arrives after an attempt to receive.
            self._loop.add_reader(end.FD, take)
            self._loop.call_soon(take)

    def _on_event(self, event: int, value: int) -> None:
        raise NotImplementedError

    def _on_message(self, parts: list[zmq.Frame]) -> None:
        raise NotImplementedError

    def post(self, call: Callable[[], object]) -> bool:
        """Have `call` called in the loop; return False if the loop has ended. Any thread may call this."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return False
        return True

    def put(self, parts: Sequence[bytes]) -> bool:
        """Send a message; return False if its receiver is gone. To be called in the loop, like all methods below."""
        self._loop.call_soon(self._receive)
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            while not self._socket.closed:
                self._on_message(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def _take_events(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            self._on_event(int(event["event"]), int(event["value"]))

    def open_stream(self, peer: bytes, number: int, end: socket.socket, process_end: int | None = None) -> None:
        """Carry the bytes of `end`, and close it at the end of the stream.

        `process_end` is a descriptor that becomes readable when the process at the other end of the socket ends: a
        child of it may still hold the socket open, so there may be no end of file.
        """
        end.setblocking(False)
        inbox: asyncio.Queue[bytes] = asyncio.Queue()
        send = partial(self._put_stream, peer, number)
        steps = [self._forward(end, send), self._write(end, inbox)]
        if process_end is not None:
            steps.append(self._drain(end, send, process_end))
        self._inboxes[peer, number] = inbox
        self._loop.create_task(self._carry(peer, number, end, steps))

    def _put_stream(self, peer: bytes, number: int, data: bytes) -> None:
        self.put([*([peer] if peer else []), number.to_bytes(4, "big"), data])

    async def _carry(
        self, peer: bytes, number: int, end: socket.socket, steps: list[Coroutine[Any, Any, None]]
    ) -> None:
        tasks = [self._loop.create_task(one) for one in steps]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            end.close()
            del self._inboxes[peer, number]
            self._put_stream(peer, number, b"")

    async def _forward(self, end: socket.socket, send: Callable[[bytes], None]) -> None:
        """Send the data that `end` receives, until the process at its other end closes it."""
        with contextlib.suppress(OSError):
            while data := await self._loop.sock_recv(end, _CHUNK):
                send(data)

    async def _write(self, end: socket.socket, inbox: asyncio.Queue[bytes]) -> None:
        """Write the data of the stream to `end`, until the other machine ends the stream."""
        while data := await inbox.get():
            with contextlib.suppress(OSError):  # The reader has closed the socket. Data from it may still arrive.
                await self._loop.sock_sendall(end, data)

    async def _drain(self, end: socket.socket, send: Callable[[bytes], None], process_end: int) -> None:
        """Send the remaining data once the process has ended."""
        await self._readable(process_end)
        with contextlib.suppress(OSError):
            while data := end.recv(_CHUNK):
                send(data)

    async def _readable(self, descriptor: int) -> None:
        """Wait until `descriptor` is readable, and close it."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(descriptor, ready.set_result, None)
        try:
            await ready
        finally:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

    def _take(self, peer: bytes, number: int, data: bytes) -> None:
        """Pass on data from the other machine; no-op if this end has closed the stream."""
        if (inbox := self._inboxes.get((peer, number))) is not None:
            inbox.put_nowait(data)

    def _end_loop(self) -> None:
        """Cancel all tasks, and close the loop."""

        async def cancel_all() -> None:
            await asyncio.sleep(0)  # A task that has not begun would not close its socket.
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._loop.run_until_complete(cancel_all())
        self._loop.close()

    def _close_socket(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)


class DriverLink(_Link):
    """The driver's end of the connections to all agents on other machines. Its thread runs until :meth:`stop`."""

    def __init__(self, key: bytes, port: int, on_wrong_secret: Callable[[], None]) -> None:
        """Listen on all addresses of this machine, at `port`; 0: any. Raise OSError if the port is in use.

        `key` is the driver's private key. `on_wrong_secret` is called in the loop when a process with another key has
        called for the first time.
        """
        events = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        super().__init__(zmq.ROUTER, events)
        self.joined: SimpleQueue[RemoteAgent | None] = SimpleQueue()
        """The agents that have sent their greeting, and then None once the thread has ended."""
        self.wrong_secret = False
        """True if a process with another key has called."""
        self._on_wrong_secret = on_wrong_secret
        self._agents: dict[bytes, RemoteAgent] = {}
        self._numbers = count(1)
        self._descriptors: set[int] = set()
        """The descriptors of the listening socket and of the connections."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(key))
        try:
            self._socket.bind(f"tcp://*:{port or '*'}")
        except zmq.ZMQError as error:
            self._end_loop()
            self._close_socket()
            raise OSError(error.errno, os.strerror(error.errno or 0)) from None
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        # If a test forks this process, the child must not keep the connections open after this process has ended.
        os.register_at_fork(after_in_child=self._close_in_child)
        self._thread = threads.start(self._run, "accel-machines")

    def stop(self) -> None:
        """End the thread. The connections stay open as long as the process, for whose end the agents wait."""
        self.post(self._loop.stop)
        threads.end(self._thread)

    def close(self) -> None:
        """End the thread and the connections."""
        self.stop()
        self._descriptors.clear()
        self._close_socket()

    def send(self, agent: RemoteAgent, message: object) -> None:
        self.put([agent.peer, bytes(4), encode(message)])

    def carry(self, agent: RemoteAgent, end: socket.socket, first: bytes = b"") -> None:
        """Open a stream to `agent`. The first bytes, here or from `end`, name its target there."""
        number = next(self._numbers)
        self.open_stream(agent.peer, number, end)
        if first:
            self._put_stream(agent.peer, number, first)

    def accept(self, agent: RemoteAgent, listener: socket.socket) -> None:
        """Open a stream to `agent` for each connection to `listener`."""

        def on_call() -> None:
            with contextlib.suppress(OSError):
                self.carry(agent, unix_sockets.accept(listener))

        listener.setblocking(False)
        self._loop.add_reader(listener, on_call)

    def end_accept(self, listener: socket.socket) -> None:
        """Close `listener`."""
        self._loop.remove_reader(listener)
        listener.close()

    def _run(self) -> None:
        try:
            self._loop.call_soon(self._ping)
            self._loop.run_forever()
        finally:
            for agent in list(self._agents.values()):
                self._lose(agent, None)
            self._end_loop()
            self.joined.put(None)

    def _ping(self) -> None:
        for agent in list(self._agents.values()):
            if not self.put([agent.peer, bytes(4), b""]):
                silent = monotonic() - agent.heard >= SILENCE - _PROBE
                self._lose(agent, f"it did not answer for {SILENCE:g} s" if silent else None)
        self._loop.call_later(_PING_INTERVAL, self._ping)

    def _on_message(self, parts: list[zmq.Frame]) -> None:
        peer, number, data = (part.bytes for part in parts)
        agent = self._agents.get(peer)
        try:
            if agent is not None:
                agent.heard = monotonic()
            if number != bytes(4):
                self._take(peer, int.from_bytes(number, "big"), data)
            elif data:
                message: ToDriver = decode(data, ToDriver)
                if isinstance(message, Hello):
                    address = str(parts[2].get("Peer-Address")).removeprefix("::ffff:")
                    self._agents[peer] = RemoteAgent(self, peer, message, address)
                    self.joined.put(self._agents[peer])
                elif isinstance(message, ClockReading):
                    self.put([peer, bytes(4), encode(ClockReading(monotonic()))])
                elif agent is not None:
                    agent.handle(message)
        except Exception:
            if agent is not None:
                self._lose(agent, f"an error at this end of the connection to it:\n{format_exc()}")

    def _lose(self, agent: RemoteAgent, why: str | None) -> None:
        """End the connection at this end. `why` is None if the process of the agent has ended."""
        self._agents.pop(agent.peer, None)
        for peer, number in self._inboxes:
            if peer == agent.peer:
                self._take(peer, number, b"")
        agent.lose(why)

    def _on_event(self, event: int, value: int) -> None:
        if event in (zmq.EVENT_LISTENING, zmq.EVENT_ACCEPTED):
            self._descriptors.add(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._descriptors.discard(value)
        elif value == _WRONG_KEY and not self.wrong_secret:
            self.wrong_secret = True
            self._on_wrong_secret()

    def _close_in_child(self) -> None:
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class AgentLink(_Link):
    """The agent's end of its connection to the driver. The agent owns it, and is its `AgentTransport`."""

    remote = True

    def __init__(self, address: str, port: int, key: bytes) -> None:
        """Connect to the driver, whose private key is `key`."""
        super().__init__(zmq.DEALER, zmq.EVENT_DISCONNECTED | _FAILED)
        self.clock = 0.0
        """Seconds to add to this machine's clock to get the driver's."""
        self._inbox: asyncio.Queue[tuple[int, bytes] | ConnectionError] = asyncio.Queue()
        """Messages that have not been handled, and the end of the connection."""
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
        received = await self._inbox.get()
        if isinstance(received, ConnectionError):
            raise received
        message: Greeting = decode(received[1], form)
        return message

    def send(self, message: object) -> None:
        self.post(partial(self._send, message))

    def _send(self, message: object) -> None:
        self.put([bytes(4), encode(message)])

    def run(self, handle: Callable[[object], None]) -> str | None:
        async def serve() -> None:
            while not isinstance(received := await self._inbox.get(), ConnectionError):  # The driver reports the end.
                number, data = received
                if number:
                    self._take_stream(number, data)
                else:
                    handle(decode(data, ToAgent))

        try:
            self._loop.run_until_complete(serve())
        except Exception:
            return f"an error at this end of the connection to it:\n{format_exc()}"
        return None

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        async def wait() -> None:
            await self._readable(descriptor)
            call()

        self._loop.create_task(wait())

    def connect_server(self, directory: str) -> socket.socket:
        self._directory = directory
        self._driver_end, server_end = socket.socketpair()
        return server_end

    def expect_exit(self, driver: int, timeout: float) -> None:
        self._send(Ending())
        # The driver's exit ends the connection.
        self._loop.call_later(timeout, self._inbox.put_nowait, ConnectionError("the driver has not exited"))

    def close(self) -> None:
        self._end_loop()
        self._close_socket()
        if self._driver_end is not None:
            self._driver_end.close()

    def _on_message(self, parts: list[zmq.Frame]) -> None:
        number, data = int.from_bytes(parts[0].bytes, "big"), parts[1].bytes
        if number or data:
            self._inbox.put_nowait((number, data))
        else:
            self.put([bytes(4), b""])

    def _on_event(self, event: int, value: int) -> None:
        error = WrongSecret if event & _FAILED else ConnectionResetError
        self._inbox.put_nowait(error("has closed the connection"))

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
                wanted = link.greet(hello, min(_HANDSHAKE_TIMEOUT, deadline - monotonic()))
            except (OSError, ValueError, asyncio.TimeoutError) as error:
                link.close()
                errors[address] = f"the process that listens there {str(error) or 'does not answer'}"
                step_once(seen, "what listens at %s, port %d, is not %s: %r", address, port, driver, error)
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
