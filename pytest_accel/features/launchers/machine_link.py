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
from collections.abc import Callable, Sequence
from functools import partial

import zmq
from zmq.utils.monitor import recv_monitor_message

SILENCE = 10
"""Seconds after which a machine that does not answer counts as lost."""
PROBE_INTERVAL = 2
"""Seconds between two probes of the kernel to a silent machine."""
HANDSHAKE_TIMEOUT = 5
"""Seconds that a caller has to prove that it knows the secret, and the driver to answer a greeting."""
STRUCT = bytes(4)
"""The number of a message that is a struct, or a ping."""
_LONGEST = 1 << 24
"""Maximum number of bytes in a message; command lines in a greeting may be long."""
_CHUNK = 1 << 16
"""Maximum number of bytes of a stream in one message."""


class MachineLink:
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
            zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT * 1000,
            zmq.RECONNECT_IVL: -1,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: PROBE_INTERVAL,
            zmq.TCP_KEEPALIVE_INTVL: PROBE_INTERVAL,
            zmq.TCP_KEEPALIVE_CNT: SILENCE // PROBE_INTERVAL - 1,
        }
        if sys.platform == "linux":
            options[zmq.TCP_MAXRT] = SILENCE * 1000
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
        self._inboxes[peer, number] = asyncio.Queue()
        self._loop.create_task(self._carry(peer, number, end, process_end))

    async def _carry(self, peer: bytes, number: int, end: socket.socket, process_end: int | None) -> None:
        send = partial(self._put_stream, peer, number)
        steps = [self._forward(end, send), self._write(end, self._inboxes[peer, number])]
        if process_end is not None:
            steps.append(self._drain(end, send, process_end))
        tasks = [self._loop.create_task(one) for one in steps]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # The loop may end meanwhile.
                end.close()
                if process_end is not None:
                    os.close(process_end)
                del self._inboxes[peer, number]
                send(b"")

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

    def _put_stream(self, peer: bytes, number: int, data: bytes) -> None:
        self.put([*([peer] if peer else []), number.to_bytes(4, "big"), data])

    async def _readable(self, descriptor: int) -> None:
        """Wait until `descriptor` is readable."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(descriptor, ready.set_result, None)
        try:
            await ready
        finally:
            self._loop.remove_reader(descriptor)

    def _take(self, peer: bytes, number: int, data: bytes) -> None:
        """Pass on data from the other machine; no-op if this end has closed the stream."""
        if (inbox := self._inboxes.get((peer, number))) is not None:
            inbox.put_nowait(data)

    def _end_loop(self) -> None:
        """Cancel all tasks, and close the loop."""

        async def cancel_all() -> None:
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.sleep(0)  # A task that has not begun would not close its socket.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        self._loop.run_until_complete(cancel_all())
        self._loop.close()

    def _close_socket(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
