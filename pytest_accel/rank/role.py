"""Which rank of which world a process is."""

from __future__ import annotations

import socket
from typing import NamedTuple

from pytest_accel.core.messages import WorldSpec
from pytest_accel.rank.process_group import Meeting
from pytest_accel.rank.run_ahead import Peers


class Role(NamedTuple):
    """Who a process is, and how it is reached."""

    spec: WorldSpec
    rank: int
    listener: socket.socket
    peers: Peers
    meeting: Meeting | None
