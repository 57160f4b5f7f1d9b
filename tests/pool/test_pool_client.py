"""Tests of the client by which an xdist worker reaches the pool, if another plugin interrupts it while it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_accel.core.world_key import WorldKey
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.pool_client import Answer, CancelDemand, DriverMessage, PoolClient, WorldGrant


class InterruptingChannel:
    """A fake channel that raises an error after the first message; `sent` has the messages of the client."""

    def __init__(self, answer: Answer | None) -> None:
        """`answer` arrives just before the error."""
        self.sent: list[Any] = []
        self.receive: Callable[[Any], None] = print
        self._answer = answer

    def send(self, item: object) -> None:
        assert isinstance(item, bytes)
        self.sent.append(decode(item, DriverMessage))
        if len(self.sent) == 1:
            if self._answer is not None:
                self.receive(encode(self._answer))
            raise TimeoutError("another plugin's timeout")

    def setcallback(self, callback: Callable[[Any], None], endmarker: object) -> None:
        self.receive = callback


@pytest.mark.parametrize("late", [False, True])
def test_a_demand_is_cancelled_if_the_wait_for_it_is_interrupted(late: bool) -> None:
    spec = WorldSpec(3, WorldKey("cpu", None, 1, grouped=True), (0,), (0,))
    answer = Answer(1, WorldGrant(spec, (1,), "/", False, 0.0, ()))
    channel: Any = InterruptingChannel(None if late else answer)
    client = PoolClient.over(channel)
    with pytest.raises(TimeoutError):
        client.acquire(WorldKey("cpu", None, 1, grouped=True), "a test")
    if late:
        channel.receive(encode(answer))
    assert channel.sent[1:] == [CancelDemand(1)]
