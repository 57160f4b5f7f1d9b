"""Tests of `RayCluster` with a fake helper process, whose messages the tests send and receive."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import BinaryIO

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.struct_messages import decode, encode
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.ray import ray_client
from pytest_accel.features.ray.cluster_machines import ClusterMachines
from pytest_accel.features.ray.ray_client import RayCluster
from pytest_accel.features.ray.ray_messages import (
    Connect,
    Connected,
    PlaceReserved,
    ReleasePlace,
    RequestPlace,
    ReservedBundle,
    ToHelper,
)
from pytest_accel.settings.options import Settings


@pytest.fixture
def helpers_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Connection]]:
    """Have a cluster start a fake helper; yield the list that gets the helper's end of the connection."""
    ends: list[Connection] = []
    processes: list[subprocess.Popen[bytes]] = []

    def start(end: socket.socket, log: BinaryIO) -> subprocess.Popen[bytes]:
        copy = end.dup()
        copy.setblocking(True)
        ends.append(Connection(copy.detach()))
        process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
        processes.append(process)
        return process

    monkeypatch.setattr(ray_client, "_start", start)
    yield ends
    for end in ends:
        end.close()
    for process in processes:
        process.wait()


@pytest.fixture
def cluster(helpers_end: list[Connection]) -> Iterator[RayCluster]:
    """Yield a cluster that is connected through the fake helper."""
    nodes = ClusterMachines(Settings(accel="sim:4"), "")
    made = RayCluster("auto", nodes)
    (helper,) = helpers_end
    decode(helper.recv_bytes(), Connect)
    helper.send_bytes(encode(Connected((), can_scale=True)))
    made.connect(60)
    yield made
    made.close()
    nodes.close()


def test_a_request_that_is_cancelled_while_it_is_placed_again_keeps_no_place(
    cluster: RayCluster, helpers_end: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = WorldKey("sim", DeviceNeed(1, "sim"), 1, True, devices_per_rank=1)
    request_id = cluster.place(key, print, print, print)
    cancelling = threading.Thread(target=cluster.cancel, args=(request_id,))
    send = cluster._send

    def send_and_cancel(message: object) -> None:
        send(message)
        if isinstance(message, ReleasePlace) and threading.current_thread() is not cancelling:
            cancelling.start()
            cancelling.join(0.1)

    monkeypatch.setattr(cluster, "_send", send_and_cancel)
    (helper,) = helpers_end
    assert isinstance(decode(helper.recv_bytes(), ToHelper), RequestPlace)
    reserved = PlaceReserved(request_id, (ReservedBundle("a machine without an agent", 1, ("0",)),))
    helper.send_bytes(encode(reserved))
    assert [type(decode(helper.recv_bytes(), ToHelper)) for _ in range(3)] == [ReleasePlace, RequestPlace, ReleasePlace]
    cancelling.join()
