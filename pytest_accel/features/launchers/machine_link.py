"""Connections between the driver and the agents of other machines, over zmq, encrypted and authenticated by CURVE.

The driver listens with one ROUTER for all agents, and each agent connects a DEALER to it. The driver's key pair follows
from the job's secret (`job_secret`), and its public key is never sent in the clear. The first message of an agent's
handshake must be encrypted for that key, and only its owner can answer. So each end has proved that it knows the secret
before either reads a message, and agents need no keys of their own. zmq itself closes connections that are slow, half
open or from another program.

A message is a number and bytes. The number 0 is for structs, and for pings, which are empty. Every other number is a
stream, which the driver opens and which carries the bytes of a local socket at each end: the first bytes name its
target, and a message without bytes ends it.

The kernel detects that the other machine is unreachable (tcp(7): SO_KEEPALIVE, TCP_USER_TIMEOUT). zmq's heartbeats were
rejected: a process that is stopped for a while does not answer them, and would count as lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from asyncio import BaseTransport, Protocol, Transport, all_tasks, current_task, gather, sleep
from collections.abc import Callable, Sequence
from functools import partial

import zmq
from zmq.utils.monitor import recv_monitor_message

from pytest_accel.compat.asyncio_shims import GuardedLoop

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


class _Stream(Protocol):
    """A local socket whose bytes go to another machine.

    The buffer for a slow reader is not bounded, since one stream must not block the others; senders truncate everything
    that they send to a driver.
    """

    def __init__(self, end: socket.socket, process_end: int | None, send: Callable[[bytes], None]) -> None:
        """`send` sends bytes of `end` to the other machine, and none at its end."""
        self.process_end = process_end
        self._end = end
        self._send = send
        self._transport: Transport | None = None
        self._early: list[bytes] = []
        """Data that has come before there is a transport."""

    def take(self, data: bytes) -> None:
        """Write `data` from the other machine; close the socket after it if it is empty."""
        if self._transport is None:
            self._early.append(data)
        elif data:
            self._transport.write(data)
        else:
            self._transport.close()

    def abort(self) -> None:
        """Close the socket now."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: BaseTransport) -> None:
        assert isinstance(transport, Transport)
        self._transport = transport
        for data in self._early:
            self.take(data)

    def data_received(self, data: bytes) -> None:
        self._send(data)

    def connection_lost(self, error: Exception | None) -> None:
        with contextlib.suppress(OSError):  # The process at the other end may have left data when it closed or ended.
            while data := self._end.recv(_CHUNK):
                self._send(data)
        self._send(b"")


class MachineLink:
    """One end of the connections: a zmq socket with its own context, the loop of one thread, and the open streams."""

    def __init__(self, kind: int, events: int) -> None:
        """`events` are the events of the socket that :meth:`_on_event` gets (zmq_socket_monitor(3))."""
        self._loop = GuardedLoop()  # The driver's process runs code of the suite.
        self._streams: dict[tuple[bytes, int], _Stream] = {}
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
        stream = self._streams[peer, number] = _Stream(end, process_end, partial(self._put_stream, peer, number))
        self._loop.create_task(self._loop.create_unix_connection(lambda: stream, sock=end))
        if process_end is not None:
            self._loop.add_reader(process_end, stream.abort)

    def _put_stream(self, peer: bytes, number: int, data: bytes) -> None:
        self.put([*([peer] if peer else []), number.to_bytes(4, "big"), data])
        stream = self._streams.pop((peer, number), None) if not data else None
        if stream is not None and stream.process_end is not None:
            self._loop.remove_reader(stream.process_end)
            os.close(stream.process_end)

    def _take(self, peer: bytes, number: int, data: bytes) -> None:
        """Pass on data from the other machine; no-op if this end has closed the stream."""
        if (stream := self._streams.get((peer, number))) is not None:
            stream.take(data)

    def _end_loop(self) -> None:
        """Close all streams, cancel all tasks, and close the loop."""

        async def end_all() -> None:
            while self._streams:
                for stream in self._streams.values():
                    stream.abort()
                await sleep(0)
            tasks = all_tasks() - {current_task()}
            for task in tasks:
                task.cancel()
            await gather(*tasks, return_exceptions=True)

        self._loop.run_until_complete(end_all())
        self._loop.close()

    def _close_socket(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
