"""The driver's end of the connections to agents on other machines."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from queue import SimpleQueue
from traceback import format_exc

import zmq
from msgspec import structs
from zmq.utils import z85

from pytest_accel.core import threads
from pytest_accel.core.clock import monotonic
from pytest_accel.core.paths import agent_path
from pytest_accel.features.launchers.agent_messages import ClockReading, Ending, Hello, Meeting, StartServer, ToDriver
from pytest_accel.features.launchers.machine_link import PROBE_INTERVAL, SILENCE, STRUCT, MachineLink
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import ServerTarget
from pytest_accel.messages.struct_messages import decode, encode, frame

_PING_INTERVAL = 0.25
"""Seconds between two pings of the driver to each agent: zmq refuses to send to an agent that is gone. A launcher that
ends the job gives rank 0 less than a second to name the process that was lost."""
_FLUSH_TIMEOUT = 2.0
"""Seconds to wait until an agent has received the last message."""
_WRONG_KEY = 0x11000001
"""The value of zmq's event if a handshake cannot be decrypted (``ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC``)."""


class DriverLink(MachineLink):
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
        self.put([agent.peer, STRUCT, encode(message)])

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
        self._loop.call_later(_PING_INTERVAL, self._ping)
        for agent in list(self._agents.values()):
            if not self.put([agent.peer, STRUCT, b""]):
                silent = monotonic() - agent.heard >= SILENCE - PROBE_INTERVAL
                self._lose(agent, f"it did not answer for {SILENCE} s" if silent else None)

    def _on_message(self, parts: list[zmq.Frame]) -> None:
        peer, number, data = (part.bytes for part in parts)
        agent = self._agents.get(peer)
        try:
            if agent is not None:
                agent.heard = monotonic()
            if number != STRUCT:
                self._take(peer, int.from_bytes(number, "big"), data)
            elif data:
                message: ToDriver = decode(data, ToDriver)
                if isinstance(message, Hello):
                    address = str(parts[2].get("Peer-Address")).removeprefix("::ffff:")
                    self._agents[peer] = RemoteAgent(self, peer, message, address)
                    self.joined.put(self._agents[peer])
                elif isinstance(message, ClockReading):
                    self.put([peer, STRUCT, encode(ClockReading(monotonic()))])
                elif agent is not None:
                    agent.handle(message)
        except Exception:
            if agent is not None:
                self._lose(agent, f"an error at this end of the connection to it:\n{format_exc()}")

    def _lose(self, agent: RemoteAgent, why: str | None) -> None:
        """End the connection at this end. `why` is None if the process of the agent has ended."""
        self._agents.pop(agent.peer, None)
        for (peer, _), stream in self._streams.items():
            if peer == agent.peer:
                stream.take(b"")
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


class RemoteAgent:
    """An agent that has connected to the driver from another machine; the `ClientTransport` of its client."""

    remote = True

    def __init__(self, link: DriverLink, peer: bytes, hello: Hello, address: str) -> None:
        """`address` is that of the agent's machine; `link` names the connection `peer`."""
        self.peer = peer
        self.hello = hello
        self.address = address
        self.heard = monotonic()
        """The time of the last message."""
        self._link = link
        self._listener: socket.socket | None = None
        """The socket at which drivers call targets on the agent's machine."""
        self._token: str | None = None
        self._handle: Callable[[object], None] | None = None
        self._on_end: Callable[[str | None], None] | None = None
        self._lost: tuple[str | None] | None = None
        """Why the connection has ended; None if it has not."""
        self._ending = threading.Event()
        """Set once the agent has received `End`, or is lost."""

    @property
    def own_address(self) -> str:
        """The address of this machine at which the agent's machine reaches it."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((self.address, 9))  # This sends nothing.
            return str(probe.getsockname()[0])

    def meet(self, *, remote: bool) -> None:
        """Answer the greeting; unless `remote`, the agent disconnects."""
        self.send(Meeting(remote))

    def start(self, handle: Callable[[object], None], on_end: Callable[[str | None], None]) -> None:
        self._link.post(partial(self._start, handle, on_end))

    def send(self, message: object) -> None:
        self._link.post(partial(self._link.send, self, message))

    def start_server(self, message: StartServer, end: socket.socket) -> None:
        message = structs.replace(message, token=self._leave_token(message.spec.basetemp))
        path = agent_path(message.spec.directory, message.spec.server)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        ends = unix_sockets.listen(path, 64), end.dup()
        if not self._link.post(partial(self._connect_server, message, *ends)):
            for one in ends:
                one.close()

    def finish(self) -> None:
        self._ending.wait(_FLUSH_TIMEOUT)
        if self._token is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._token)

    def _leave_token(self, basetemp: str) -> str:
        """Return the path of a file in `basetemp` by which the agent finds out if the two share a file system."""
        if self._token is None:
            os.makedirs(basetemp, mode=0o700, exist_ok=True)
            self._token = os.path.join(basetemp, f"accel-shared-{secrets.token_hex(8)}")
            with open(self._token, "w", encoding="utf-8"):
                pass
        return self._token

    # In the loop of the link

    def handle(self, message: object) -> None:
        """Pass on a message of the agent."""
        if isinstance(message, Ending):
            self._ending.set()
        elif self._handle is not None:
            self._handle(message)

    def lose(self, why: str | None) -> None:
        """Report that the connection has ended, with the reason if the whole machine counts as lost."""
        self._lost = (why,)
        self._ending.set()
        if self._listener is not None:
            self._link.end_accept(self._listener)
        if self._on_end is not None:
            self._on_end(why)

    def _start(self, handle: Callable[[object], None], on_end: Callable[[str | None], None]) -> None:
        self._handle, self._on_end = handle, on_end
        if self._lost is not None:
            on_end(*self._lost)

    def _connect_server(self, message: StartServer, listener: socket.socket, end: socket.socket) -> None:
        """Have the agent start a fork server that is connected to `end`.

        Each connection to `listener`, which replaces the earlier one, becomes a stream to the agent.
        """
        if self._lost is not None:
            listener.close()
            end.close()
            return
        if self._listener is not None:
            self._link.end_accept(self._listener)
        self._listener = listener
        self._link.accept(self, listener)
        self._link.send(self, message)
        self._link.carry(self, end, frame(encode(ServerTarget())))
