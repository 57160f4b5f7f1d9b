"""Connections between the driver and the agents of other machines, over zmq, encrypted and authenticated by CURVE.

The driver listens with one ROUTER for all agents, and each agent connects a DEALER to it. The driver's key pair follows
from the job's secret (`job_secret`), and its public key is never sent in the clear. The first message of an agent's
handshake must be encrypted for that key, and only its owner can answer. So each end has proved that it knows the secret
before either reads a message, and agents need no keys of their own. zmq itself closes connections that are slow, half
open or from another program.

A connection carries streams, each of the bytes of a local socket at each end. A message is the number of a stream and
bytes; one without bytes ends the stream. The agent opens one stream, which lasts as long as the agent. All others are
opened by the driver, and the first bytes name the target (`AgentTarget` or `messages/connect.py`). The number 0 is not
a stream: it is for pings and for the comparison of clocks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pytest_accel.compat.asyncio_shims import GuardedLoop
from pytest_accel.core import threads
from pytest_accel.core.clock import monotonic
from pytest_accel.features.launchers.agent_messages import AgentTarget
from pytest_accel.features.launchers.job_secret import WrongSecret
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import Inspection, RankTarget
from pytest_accel.messages.struct_messages import LENGTH, decode, encode, frame
from pytest_accel.messages.unix_sockets import Connection

_SILENCE = 10
"""Seconds after which a machine that does not answer counts as lost."""
_PROBE_INTERVAL = 2
"""Seconds between two probes of the kernel to a silent machine."""
_PING_INTERVAL = 0.25
"""Seconds between two pings of the driver to each agent: zmq refuses to send to an agent that is gone. A launcher that
ends the job gives rank 0 less than a second to name the process that was lost."""
_HANDSHAKE_TIMEOUT = 5
"""Seconds that a caller has to prove that it knows the secret, and the driver to answer it."""
_CALL_TIMEOUT = 3.0
"""Seconds that an attempt to connect may take."""
_CLOCK_ROUNDS = 5
"""Number of rounds in which the clocks are compared."""
_LONGEST = 1 << 24
"""Maximum number of bytes in a message."""
_CHUNK = 1 << 16
"""Maximum number of bytes of a stream in one message."""
_NO_STREAM, _OF_AGENT, _FIRST_OF_DRIVER = 0, 1, 2
"""The number of pings and clocks, of the stream that the agent opens, and of the driver's first stream."""
_CLOCK = struct.Struct("!d")
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_WRONG_KEY = 0x11000001
"""The value of zmq's event if a handshake cannot be decrypted (``ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC``)."""
_OTHER_PROGRAM = "the process that listens there"
Target = AgentTarget | Inspection | RankTarget
"""The target of a stream of the driver."""
OpenTarget = Callable[[Target], tuple[socket.socket, int | None]]
"""Returns a socket that is connected to a target and, if the target is a process of this machine, a descriptor that
becomes readable when the process ends; raises OSError if there is no such target."""


class _MachineLink(ABC):
    """One end of the connections: a zmq socket with its own context, the loop of one thread, and the open streams."""

    def __init__(self, kind: int, events: int) -> None:
        """`events` are the events of the socket that :meth:`_on_event` gets (zmq_socket_monitor(3))."""
        self._loop = GuardedLoop()  # The driver's process runs code of the suite.
        self._thread: threading.Thread | None = None
        self._streams: dict[tuple[bytes, int], asyncio.Queue[bytes]] = {}
        """The data that has come for each open stream from the other machine. It is not bounded, since one slow reader
        must not block the others; senders truncate everything that they send to a driver."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        options = {
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            zmq.SNDHWM: 0,  # Messages wait in memory: no call blocks, and no message is dropped.
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: _LONGEST,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_TIMEOUT * 1000,
            zmq.RECONNECT_IVL: -1,
            # The kernel detects that the other machine is unreachable (tcp(7): SO_KEEPALIVE, TCP_USER_TIMEOUT). zmq's
            # heartbeats were rejected: a process that is stopped for a while does not answer them, and would count as
            # lost.
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: _PROBE_INTERVAL,
            zmq.TCP_KEEPALIVE_INTVL: _PROBE_INTERVAL,
            zmq.TCP_KEEPALIVE_CNT: _SILENCE // _PROBE_INTERVAL - 1,
        }
        if sys.platform == "linux":
            options[zmq.TCP_MAXRT] = _SILENCE * 1000
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(events)
        for end, take in ((self._monitor, self._take_events), (self._socket, self._receive)):
            # The descriptor of a zmq socket becomes readable only for what arrives after an attempt to receive.
            self._loop.add_reader(end.FD, take)
            self._loop.call_soon(take)

    def _run_in_thread(self) -> None:
        self._thread = threads.start(self._run, "accel-machines")

    def _run(self) -> None:
        """Run the loop until it is stopped, and then end the streams."""
        self._loop.run_forever()
        self._streams.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._loop.run_until_complete(asyncio.wait(self._tasks))
        self._loop.close()

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        """Have `call` called in the loop; no-op if that has ended. Any thread may call this."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def close(self) -> None:
        """End the thread and the connections. A driver's connections otherwise stay open as long as its process."""
        if self._socket.closed:
            return
        self._post(self._loop.stop)
        if self._thread is None:
            self._run()
        else:
            threads.end(self._thread)
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    # In the loop

    @abstractmethod
    def _on_event(self, event: int, value: int) -> None:
        """Handle an event of the socket's monitor."""

    @abstractmethod
    def _on_message(self, peer: bytes, number: int, data: bytes) -> None:
        """Handle the data of the stream `number` of `peer`."""

    def _start(self, work: Coroutine[object, object, None], *ends: socket.socket) -> None:
        """Start a task that uses `ends`, which are closed at its end, also if it is cancelled before it has begun."""

        def on_end(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            for end in ends:
                end.close()

        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(on_end)

    def _put(self, peer: bytes, number: int, data: bytes) -> bool:
        """Send a message; return False if its receiver is gone."""
        # Sending may consume the event of a message that has come (zmq_getsockopt(3), ZMQ_FD): look for messages, too.
        self._loop.call_soon(self._receive)
        try:
            self._socket.send_multipart([*([peer] if peer else []), number.to_bytes(4, "big"), data], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _receive(self) -> None:
        with suppress(zmq.Again):
            while not self._socket.closed:
                *peer, number, data = self._socket.recv_multipart(zmq.NOBLOCK)
                self._on_message(b"".join(peer), int.from_bytes(number, "big"), data)

    def _take_events(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            self._on_event(int(event["event"]), int(event["value"]))

    def _open(self, peer: bytes, number: int, end: socket.socket, process_end: int | None = None) -> None:
        """Carry the bytes of `end`, and close it at the end of the stream.

        `process_end` is a descriptor that becomes readable when the process at the other end of the socket ends: a
        child of it may still hold the socket open, so there may be no end of file.
        """
        inbox = self._streams[peer, number] = asyncio.Queue()
        self._start(self._carry(peer, number, end, process_end, inbox), end)

    async def _carry(
        self, peer: bytes, number: int, end: socket.socket, process_end: int | None, inbox: asyncio.Queue[bytes]
    ) -> None:
        over = asyncio.Event()

        def on_data() -> None:
            try:
                data = end.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data or not self._put(peer, number, data):
                over.set()

        def on_process_end(descriptor: int) -> None:
            self._loop.remove_reader(descriptor)
            end.shutdown(socket.SHUT_RDWR)  # Data that it has written can still be read.

        end.setblocking(False)
        writing = self._loop.create_task(self._write(end, inbox))
        self._loop.add_reader(end, on_data)
        if process_end is not None:
            self._loop.add_reader(process_end, on_process_end, process_end)
        try:
            await over.wait()
        finally:
            self._loop.remove_reader(end)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            if process_end is not None:
                self._loop.remove_reader(process_end)
                os.close(process_end)
            if self._streams.pop((peer, number), None) is not None:
                self._put(peer, number, b"")

    async def _write(self, end: socket.socket, inbox: asyncio.Queue[bytes]) -> None:
        with suppress(OSError):  # Data that the process there has written before its end is still carried.
            while data := await inbox.get():
                await self._loop.sock_sendall(end, data)
            end.shutdown(socket.SHUT_RDWR)

    def _end_streams(self, peer: bytes) -> None:
        for (other, _), inbox in self._streams.items():
            if other == peer:
                inbox.put_nowait(b"")


class DriverLink(_MachineLink):
    """The driver's end of the connections to all agents on other machines."""

    def __init__(
        self, key: bytes, port: int, answer: Callable[[], socket.socket], on_wrong_secret: Callable[[], None]
    ) -> None:
        """Listen on all addresses of this machine, at `port` (any if it is 0). Raise OSError if the port is in use.

        `key` is the driver's private key. `answer` returns the connection to the driver for an agent that has called,
        or raises OSError. `on_wrong_secret` is called when a process with another key has called for the first time.
        Both are called in the loop.
        """
        events = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        super().__init__(zmq.ROUTER, events)
        self.wrong_secret = False
        """True if a process with another key has called."""
        self.losses: dict[str, str] = {}
        """For each agent whose machine is lost, the reason."""
        self._answer, self._on_wrong_secret = answer, on_wrong_secret
        self._heard: dict[bytes, float] = {}
        """The time of the last message of each agent."""
        self._numbers = count(_FIRST_OF_DRIVER)
        self._descriptors: set[int] = set()
        """The descriptors of the listening socket and of the connections."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(key))
        try:
            self._socket.bind(f"tcp://*:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, os.strerror(error.errno or 0)) from None
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        # If a test forks this process, the child must not keep the connections open after this process has ended.
        os.register_at_fork(after_in_child=self._close_in_child)
        self._loop.call_soon(self._ping)
        self._run_in_thread()

    def open(self, agent: str, target: Target, end: socket.socket) -> None:
        """Connect `end` to a target of the agent with this `AgentLink.name`; close it at once if the agent is lost."""
        self._post(self._open_next, agent.encode(), end, frame(encode(target)))

    def listen(self, agent: str, listener: socket.socket) -> None:
        """Connect each connection to `listener` to the target of this agent that its first bytes name."""
        self._post(lambda: self._start(self._accept(agent.encode(), listener), listener))

    def close(self) -> None:
        super().close()
        self._descriptors.clear()

    def _open_next(self, peer: bytes, end: socket.socket, first: bytes = b"") -> None:
        number = next(self._numbers)
        self._open(peer, number, end)
        if first and not self._put(peer, number, first):
            self._streams[peer, number].put_nowait(b"")

    async def _accept(self, peer: bytes, listener: socket.socket) -> None:
        def on_call() -> None:
            with suppress(OSError):
                self._open_next(peer, unix_sockets.accept(listener))

        listener.setblocking(False)
        self._loop.add_reader(listener, on_call)
        try:
            await self._loop.create_future()
        finally:
            self._loop.remove_reader(listener)

    def _ping(self) -> None:
        self._loop.call_later(_PING_INTERVAL, self._ping)
        for peer, heard in list(self._heard.items()):
            if self._put(peer, _NO_STREAM, b""):
                continue
            del self._heard[peer]
            # An agent that was heard until now has ended; otherwise the kernel has given up on its machine.
            if monotonic() - heard >= _SILENCE - _PROBE_INTERVAL:
                self.losses[peer.decode()] = f"it did not answer for {_SILENCE} s"
            self._end_streams(peer)

    def _on_message(self, peer: bytes, number: int, data: bytes) -> None:
        is_known = peer in self._heard
        if is_known:
            self._heard[peer] = monotonic()
        if number == _NO_STREAM:
            if data:
                self._put(peer, _NO_STREAM, _CLOCK.pack(monotonic()))
        elif (inbox := self._streams.get((peer, number))) is not None:
            inbox.put_nowait(data)
        elif number == _OF_AGENT and not is_known:
            self._heard[peer] = monotonic()
            with suppress(OSError):
                self._open(peer, number, self._answer())
                self._streams[peer, number].put_nowait(data)

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
            with suppress(OSError):
                os.close(descriptor)


class AgentLink(_MachineLink):
    """The agent's end of its connection to the driver."""

    def __init__(self, own_address: str, address: str, port: int, key: bytes) -> None:
        """Connect to the driver, which has the private key `key`, at `address`. `own_address` is this machine's."""
        super().__init__(zmq.DEALER, zmq.EVENT_DISCONNECTED | _FAILED)
        self.name = secrets.token_hex(8)
        """The name by which the driver addresses this end."""
        self.own_address = own_address.removeprefix("::ffff:")
        self.driver_address = address.removeprefix("::ffff:")
        self.clock = 0.0
        """Seconds to add to this machine's clock to get the driver's."""
        self._open_target: OpenTarget | None = None
        self._numbers: set[int] = set()
        """The streams that the driver has opened and has not ended."""
        self._socket.setsockopt(zmq.ROUTING_ID, self.name.encode())
        public, private = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(key)))
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        self._socket.connect(f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}")

    def compare_clocks(self) -> None:
        """Set `clock`. Raise ConnectionError if the connection ends, or if the driver does not answer.

        Called before :meth:`start`.
        """
        poller = zmq.Poller()
        for source in (self._socket, self._monitor):
            poller.register(source, zmq.POLLIN)
        rounds = []
        for _ in range(_CLOCK_ROUNDS):
            began = monotonic()
            self._socket.send_multipart([_NO_STREAM.to_bytes(4, "big"), b"?"])
            sources = dict(poller.poll(_HANDSHAKE_TIMEOUT * 1000))
            if self._monitor in sources:
                error = WrongSecret if recv_monitor_message(self._monitor)["event"] & _FAILED else ConnectionResetError
                raise error(f"{_OTHER_PROGRAM} has closed the connection")
            if not sources:
                raise ConnectionError(f"{_OTHER_PROGRAM} does not answer")
            there = _CLOCK.unpack(self._socket.recv_multipart()[1])[0]
            took = monotonic() - began
            # The driver read its clock between sending and receiving, so the shortest round gives the smallest error.
            rounds.append((took, there - began - took / 2))
        self.clock = min(rounds)[1]

    def start(self, open_target: OpenTarget) -> Connection:
        """Start the thread, in which `open_target` is called, and return the agent's own connection to the driver."""
        self._open_target = open_target
        end, ours = unix_sockets.pair()
        self._open(b"", _OF_AGENT, end)
        self._run_in_thread()
        return Connection(ours.detach())

    def _on_message(self, peer: bytes, number: int, data: bytes) -> None:
        if number == _NO_STREAM:
            self._put(b"", _NO_STREAM, b"")
            return
        if number >= _FIRST_OF_DRIVER:
            if not data:
                self._numbers.discard(number)
            elif number not in self._numbers:
                self._numbers.add(number)
                if not (data := self._open_stream(number, data)):
                    return
        if (inbox := self._streams.get((b"", number))) is not None:
            inbox.put_nowait(data)

    def _open_stream(self, number: int, data: bytes) -> bytes:
        """Open the stream to the target that `data` names; return the bytes that follow."""
        assert self._open_target is not None
        end = LENGTH.size + int.from_bytes(data[: LENGTH.size], "big")
        try:
            self._open(b"", number, *self._open_target(decode(data[LENGTH.size : end], Target)))
        except (OSError, ValueError):  # There is no such target.
            self._put(b"", number, b"")
        return data[end:]

    def _on_event(self, event: int, value: int) -> None:
        self._end_streams(b"")


def call(address: str, port: int, key: bytes) -> AgentLink:
    """Connect to the driver.

    Raise OSError or ValueError if that is not possible, and :class:`WrongSecret` if the process that listens refuses.
    """
    # zmq does not report why it cannot connect: try without it first.
    with socket.create_connection((address, port), _CALL_TIMEOUT) as probe:
        ends = [str(end[0]) for end in (probe.getsockname(), probe.getpeername())]
    link = AgentLink(ends[0], ends[1], port, key)
    try:
        link.compare_clocks()
    except BaseException:
        link.close()
        raise
    return link
