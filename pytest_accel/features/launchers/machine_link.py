"""Connections between the driver and the agents of its session, over zmq, encrypted and authenticated by CURVE.

The driver listens with one ROUTER for all agents, and each agent connects a DEALER to it. The driver's key pair follows
from the job's secret (`rendezvous`), and its public key is never sent in the clear. The first message of an agent's
handshake must be encrypted for that key, and only its owner can answer. So each end has proved that it knows the secret
before either reads a message, and agents need no keys of their own. zmq itself closes connections that are slow, half
open or from another program.

A message is the number of a stream and bytes. A stream carries the bytes of a local socket at each end; a message
without bytes ends it. The driver opens all streams, and the first bytes name the target (`AgentTarget` or
`messages/connect.py`). The number 0 is not a stream: it is for the greeting, with its answer, and for pings.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

import zmq
from msgspec import structs
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pytest_accel.compat.loop_tasks import GuardedLoop
from pytest_accel.core import threads
from pytest_accel.core.clock import monotonic
from pytest_accel.core.log import step
from pytest_accel.features.launchers.agent_messages import AgentTarget, Hello
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import Inspection, RankTarget
from pytest_accel.messages.struct_messages import LENGTH, decode, encode, frame

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
_RETRY_INTERVAL = 0.05
"""Seconds between two attempts to connect to the driver."""
_REFUSED_TIMEOUT = 5.0
"""Seconds for which to retry if the process at the driver's address ends the handshake: a busy driver may be too slow
for it, which looks like another secret."""
_LONGEST = 1 << 24
"""Maximum number of bytes in a message."""
_CHUNK = 1 << 16
"""Maximum number of bytes of a stream in one message."""
_NO_STREAM = 0
"""The number of messages that belong to no stream."""
_CLOCK = struct.Struct("!d")
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_OTHER_PROGRAM = "the process that listens there"
Target = AgentTarget | Inspection | RankTarget
"""The target of a stream."""


class WrongSecret(ConnectionError):
    """The listening process did not accept this process: it has another secret or job, or is no driver."""


class _MachineLink(ABC):
    """One end of the connections: a zmq socket with its own context, an event loop, and the open streams."""

    def __init__(self, kind: int) -> None:
        self.loop = GuardedLoop()  # The driver's process runs code of the suite.
        self._streams: dict[tuple[bytes, int], asyncio.Queue[bytes]] = {}
        """The data that has come for each open stream from the other machine, by the name of the agent (empty in an
        agent) and the number of the stream. It is not bounded, since one slow reader must not block the others; senders
        truncate everything that they send to a driver."""
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
        # The descriptor of a zmq socket becomes readable only for what arrives after an attempt to receive.
        self._descriptor = self._socket.FD
        self.loop.add_reader(self._descriptor, self._receive)
        self.loop.call_soon(self._receive)

    def disconnect(self) -> None:
        """End the streams and the connections; the loop must not be running. No-op if that has been done."""
        if self._socket.closed:
            return
        self._streams.clear()
        tasks = tuple(self._tasks)  # A task that ends removes itself from the set, before the wait begins, too.
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.remove_reader(self._descriptor)
        self._context.destroy(linger=0)

    # In the loop

    @abstractmethod
    def _on_message(self, peer: bytes, number: int, data: bytes) -> None:
        """Handle the data of the stream `number` of `peer`."""

    def _put(self, peer: bytes, number: int, data: bytes) -> bool:
        """Send a message; return False if its receiver is gone."""
        # Sending may consume the event of a message that has come (zmq_getsockopt(3), ZMQ_FD): look for messages, too.
        self.loop.call_soon(self._receive)
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

    def _open(self, peer: bytes, number: int, end: socket.socket) -> None:
        """Carry the bytes of `end`, and close it at the end of the stream."""

        def on_end(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            with end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # It may also be open in a process that a test has forked.

        inbox = self._streams[peer, number] = asyncio.Queue()
        task = self.loop.create_task(self._carry(peer, number, end, inbox))
        self._tasks.add(task)
        task.add_done_callback(on_end)

    async def _carry(self, peer: bytes, number: int, end: socket.socket, inbox: asyncio.Queue[bytes]) -> None:
        end.setblocking(False)
        writing = self.loop.create_task(self._write(end, inbox))
        try:
            with suppress(OSError):
                while (data := await self.loop.sock_recv(end, _CHUNK)) and self._put(peer, number, data):
                    pass
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            if self._streams.pop((peer, number), None) is not None:
                self._put(peer, number, b"")

    async def _write(self, end: socket.socket, inbox: asyncio.Queue[bytes]) -> None:
        # Data that the process there has written before it closed its end is carried. An asyncio transport drops it.
        with suppress(OSError):
            while data := await inbox.get():
                await self.loop.sock_sendall(end, data)
            end.shutdown(socket.SHUT_RDWR)


class DriverLink(_MachineLink):
    """The driver's end of the connections to all agents. Its loop runs in a thread of its own."""

    def __init__(self, key: bytes, port: int, on_join: Callable[[str, Hello], object]) -> None:
        """Listen on all addresses of this machine, at `port` (any if it is 0). Raise OSError if the port is in use.

        `key` is the driver's private key. `on_join` is called in the loop with the name and greeting of each agent.
        """
        super().__init__(zmq.ROUTER)
        self._on_join = on_join
        self.on_lost: Callable[[], object] = lambda: None
        """Called in the loop when the connection to an agent has ended, before its streams end."""
        self.lost: dict[str, str | None] = {}
        """The agents to which the connection has ended, by name: the reason if the whole machine is lost, else None."""
        self._heard: dict[bytes, float] = {}
        """The time of the last message of each agent that is connected."""
        self._numbers = count(_NO_STREAM + 1)
        self._listeners: list[socket.socket] = []
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(key))
        try:
            self._socket.bind(f"tcp://*:{port or '*'}")
        except zmq.ZMQError as error:
            self._close_loop()
            raise OSError(error.errno, os.strerror(error.errno or 0)) from None
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.loop.call_soon(self._ping)
        self._thread = threads.start(self._run, "accel-machines")

    def _run(self) -> None:
        self.loop.run_forever()
        self._close_loop()

    def _close_loop(self) -> None:
        self.disconnect()
        for listener in self._listeners:
            self.loop.remove_reader(listener)
            listener.close()
        self.loop.close()

    def close(self) -> None:
        """End the connections and the thread. Otherwise they stay open as long as this process."""
        self._post(self.loop.stop)
        self._thread.join(threads.END_TIMEOUT)

    def _post(self, call: Callable[..., object], *arguments: object) -> bool:
        """Have `call` called in the loop; return False if that has ended. Any thread may call this."""
        try:
            self.loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return False
        return True

    # The agents, by name

    def open(self, agent: str, target: Target, end: socket.socket) -> None:
        """Connect `end` to a target of the agent; close it at once if the agent is lost."""
        if not self._post(self._open_next, agent.encode(), end, frame(encode(target))):
            end.close()

    def listen(self, agent: str, listener: socket.socket) -> None:
        """Connect each connection to `listener` to the target of the agent that its first bytes name."""

        def on_call() -> None:
            with suppress(OSError):
                self._open_next(agent.encode(), unix_sockets.accept(listener))

        listener.setblocking(False)
        self._listeners.append(listener)
        self._post(self.loop.add_reader, listener, on_call)

    # In the loop

    def _open_next(self, peer: bytes, end: socket.socket, first: bytes = b"") -> None:
        number = next(self._numbers)
        self._open(peer, number, end)
        if peer not in self._heard or (first and not self._put(peer, number, first)):
            self._lose(peer)

    def _lose(self, peer: bytes) -> None:
        """Report the loss of an agent, and end its streams."""
        if (heard := self._heard.pop(peer, None)) is not None:
            # An agent that was heard until now has ended; otherwise the kernel has given up on its machine.
            is_silent = monotonic() - heard >= _SILENCE - _PROBE_INTERVAL
            self.lost[peer.decode()] = f"it did not answer for {_SILENCE} s" if is_silent else None
            self.on_lost()
        for (other, _), inbox in self._streams.items():
            if other == peer:
                inbox.put_nowait(b"")

    def _ping(self) -> None:
        self.loop.call_later(_PING_INTERVAL, self._ping)
        for peer in list(self._heard):
            if not self._put(peer, _NO_STREAM, b""):
                self._lose(peer)

    def _on_message(self, peer: bytes, number: int, data: bytes) -> None:
        if number == _NO_STREAM and data:
            self._put(peer, _NO_STREAM, _CLOCK.pack(monotonic()))
            self._heard[peer] = monotonic()
            with suppress(ValueError):  # Another release of the plugin.
                self._on_join(peer.decode(), decode(data, Hello))
        elif peer in self._heard:
            self._heard[peer] = monotonic()
            if (inbox := self._streams.get((peer, number))) is not None:
                inbox.put_nowait(data)


class AgentLink(_MachineLink):
    """The agent's end of its connection to the driver. The agent runs the loop."""

    def __init__(self, address: str, port: int, key: bytes) -> None:
        """Connect to the driver, which has the private key `key`, at `address`."""
        super().__init__(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED)
        self.clock = 0.0
        """Seconds to add to this machine's clock to get the driver's."""
        self._open_target: Callable[[Target], socket.socket] | None = None
        self._numbers: set[int] = set()
        """The streams that the driver has opened and has not ended."""
        public, private = zmq.curve_keypair()
        self._socket.setsockopt(zmq.ROUTING_ID, secrets.token_hex(8).encode())
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(key)))
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        self._socket.connect(f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}")

    def disconnect(self) -> None:
        if not self._socket.closed:
            self.loop.remove_reader(self._monitor.FD)
            self._socket.disable_monitor()
        super().disconnect()

    def close(self) -> None:
        self.disconnect()
        self.loop.close()

    def serve(self, open_target: Callable[[Target], socket.socket], on_end: Callable[[], object]) -> None:
        """Have both called in the loop.

        `open_target` returns a socket that is connected to a target, or raises OSError if there is no such target.
        `on_end` is called when the connection has ended.
        """

        def look() -> None:
            if not self._socket.closed and self._monitor.poll(0):
                on_end()

        self._open_target = open_target
        self.loop.add_reader(self._monitor.FD, look)
        self.loop.call_soon(look)

    def greet(self, hello: Hello) -> None:
        """Send `hello`, and set `clock` by the answer.

        Raise ConnectionError if the connection ends, or if the driver does not answer.
        """
        poller = zmq.Poller()
        for source in (self._socket, self._monitor):
            poller.register(source, zmq.POLLIN)
        began = monotonic()
        self._socket.send_multipart([_NO_STREAM.to_bytes(4, "big"), encode(hello)])
        sources = dict(poller.poll(_HANDSHAKE_TIMEOUT * 1000))
        if self._monitor in sources:
            error = WrongSecret if recv_monitor_message(self._monitor)["event"] & _FAILED else ConnectionResetError
            raise error(f"{_OTHER_PROGRAM} has closed the connection")
        if not sources:
            raise ConnectionError(f"{_OTHER_PROGRAM} does not answer")
        # The driver has read its clock some time between the two moments.
        self.clock = _CLOCK.unpack(self._socket.recv_multipart()[1])[0] - (began + monotonic()) / 2

    def _on_message(self, peer: bytes, number: int, data: bytes) -> None:
        if number == _NO_STREAM:
            self._put(b"", _NO_STREAM, b"")
            return
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
            self._open(b"", number, self._open_target(decode(data[LENGTH.size : end], Target)))
        except (OSError, ValueError):  # There is no such target.
            self._put(b"", number, b"")
        return data[end:]


def call(addresses: Sequence[str], port: int, key: bytes, hello: Hello, driver: str, timeout: float) -> AgentLink:
    """Connect to the driver at one of `addresses`, and greet it with `hello` and the addresses of the connection.

    `driver` is its name in the log. Retry for `timeout` seconds, then raise ConnectionError with the reason for each
    address: :class:`WrongSecret` if a process that listens there has refused the connection for some seconds.
    """
    deadline, refused_since = monotonic() + timeout, None
    errors: dict[str, Exception] = {}
    while True:
        for address in addresses:
            try:
                link = _call(address, port, key, hello)
                step("is connected to %s at %s, port %d", driver, address, port)
                return link
            except (OSError, ValueError) as error:  # ValueError: the address cannot be a host's name.
                if str(error) != str(errors.get(address)):
                    step("cannot connect to %s at %s, port %d: %s", driver, address, port, error)
                errors[address] = error
        is_refused = any(isinstance(error, WrongSecret) for error in errors.values())
        refused_since = (refused_since or monotonic()) if is_refused else None
        if monotonic() >= min(deadline, math.inf if refused_since is None else refused_since + _REFUSED_TIMEOUT):
            reasons = "; ".join(f"{address}: {error}" for address, error in errors.items())
            raise (WrongSecret if is_refused else ConnectionError)(reasons)
        time.sleep(_RETRY_INTERVAL)


def _call(address: str, port: int, key: bytes, hello: Hello) -> AgentLink:
    # zmq does not report why it cannot connect: try without it first.
    with socket.create_connection((address, port), _CALL_TIMEOUT) as probe:
        own, other = (str(end[0]).removeprefix("::ffff:") for end in (probe.getsockname(), probe.getpeername()))
    link = AgentLink(other, port, key)
    try:
        link.greet(structs.replace(hello, address=own, driver_address=other))
    except BaseException:
        link.close()
        raise
    return link
