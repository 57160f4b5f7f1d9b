"""The controller's end of the conversation between the driver in an xdist worker and the pool (`pool_client`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from traceback import format_exc

from pytest_accel.leases.demand import WorldDemand
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pool_client import Answer, Channel, DriverMessage, PoolMessage, ShowLine


class WorkerDriver:
    """The driver of an xdist worker, whose messages arrive in execnet's receiver thread."""

    def __init__(
        self,
        channel: Channel,
        pool: Callable[[], Pool],
        show: Callable[[str], None],
    ) -> None:
        """`pool` returns the pool, and creates it at the first call, when a worker first needs it.

        `show` writes a line to the terminal.
        """
        self._channel = channel
        self._get_pool = pool
        self._show = show
        self._used_pool: Pool | None = None
        """The pool; None if the worker has not needed it, or it could not be created."""

    def handle(self, message: PoolMessage) -> None:
        with suppress(OSError):  # The worker has ended; the end marker follows.
            self._channel.send(encode(message))

    def receive(self, data: bytes | None) -> None:
        """Handle a serialized message of the worker; `data` is None if the worker has ended."""
        message: DriverMessage | None = None
        try:
            if data is not None:
                message = decode(data, DriverMessage)
                if isinstance(message, ShowLine):
                    self._show(message.line)
                else:
                    self._used_pool = self._get_pool()
                    self._used_pool.post(self._used_pool.serve, self, message)
            elif self._used_pool is not None:
                self._used_pool.post(self._used_pool.driver_lost, self)
        except BaseException:  # execnet would hide the error: answer the request with it, and fail the pool.
            why = f"a request of an xdist worker has ended with an error:\n{format_exc().rstrip()}"
            if isinstance(message, WorldDemand):
                self.handle(Answer(message.number, why))
            if self._used_pool is not None:
                self._used_pool.post(self._used_pool.broken_by, why)
