"""Tests of the driver's end of the link to a rank: what it reads of messages that arrive in any pieces."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from pytest_accel.core.session_folder import rank_path
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.link_to_rank import LinkToRank
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.rank_messages import CannotRun
from pytest_accel.messages.struct_messages import encode, frame
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.pool_client import WorldGrant


def test_the_rest_of_a_message_is_not_awaited(tmp_path: Path) -> None:
    spec = WorldSpec(1, WorldKey("cpu", None, 1, grouped=True), (0,), (0,))
    grant = WorldGrant(spec, (os.getpid(),), str(tmp_path), False, 0.0, ())
    short, long = CannotRun("short"), CannotRun("long" * 30_000)
    sent = frame(encode((short, short))) + frame(encode((long,)))
    with (
        unix_sockets.listen(rank_path(grant.directory, spec.world, 0, "sock"), 1) as listener,
        closing(LinkToRank(grant, 0)) as link,
    ):
        with unix_sockets.accept(listener) as rank:
            received: list[object] = []
            for part, complete in ((sent[:2], []), (sent[2:-1], [short] * 2), (sent[-1:], [short, short, long])):
                rank.sendall(part)
                while unix_sockets.is_readable(link.connection.fileno()):
                    received += link.receive()
                assert received == complete
        with pytest.raises(EOFError):
            next(link.receive())
