"""The program of the helper process that talks to Ray for the controller, which never imports ray.

The helper is what Ray calls a driver: Ray removes its placement groups and actors when it exits. The helper exits when
its connection to the controller is closed, or when the controller exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
from importlib import import_module
from importlib.util import find_spec
from traceback import format_exc
from typing import TYPE_CHECKING, Any

from pytest_accel.core import log, prctl
from pytest_accel.core.log import step
from pytest_accel.features.ray.ray_messages import (
    Connect,
    Connected,
    HelperFailed,
    ReleasePlace,
    RequestPlace,
    StartAgent,
    StopAgent,
    ToHelper,
)
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection

if TYPE_CHECKING:
    from pytest_accel.features.ray.ray_places import Places

_REACH_TIMEOUT = 5.0
"""Seconds in which the cluster's address must accept a connection; Ray would try for minutes."""
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds after which Ray ends this process if the cluster's head is lost; Ray's default is a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}


def main(descriptor: int, parent: int) -> None:
    """Serve the controller, the process `parent`, over the connection with this `descriptor`."""
    prctl.die_with_parent(parent)
    log.start_here("Ray client")
    with Connection(descriptor) as connection:
        request: Connect = decode(connection.recv_bytes(), Connect)
        try:
            step("connects to the Ray cluster: %s", request.address)
            ray = _connect(request)
            _serve(connection, ray)
            ray.shutdown()
        except _Unreachable as error:
            step("ends: %s", error)
            connection.send_bytes(encode(HelperFailed(str(error))))
        except Exception:
            reason = f"the process that talks to Ray has ended with an error:\n{format_exc()}"
            connection.send_bytes(encode(HelperFailed(reason)))


class _Unreachable(Exception):
    """The cluster cannot be reached; the message says why."""


def _connect(request: Connect) -> Any:
    """Return the module ray, connected to the cluster."""
    if find_spec("ray") is None:
        raise _Unreachable("ray is not installed: pip install 'pytest-accel[ray]'")
    if request.address != "auto":
        _ensure_reachable(request.address)
    os.environ.update(_SETTINGS)
    ray = import_module("ray")
    try:
        ray.init(
            address=request.address,
            namespace=request.namespace,
            log_to_driver=False,
            configure_logging=False,
            logging_level="ERROR",
        )
    except ConnectionError as error:
        if request.address == "auto":
            raise _Unreachable(
                f"no Ray cluster runs on {platform.node()}; start one (ray start --head), or join one "
                "(ray start --address=HOST:PORT)"
            ) from error
        raise _Unreachable(f"the Ray cluster at {request.address} cannot be used: {error}") from error
    except Exception as error:  # Ray raises RuntimeError and others, as for a mismatch of versions.
        where = "of this machine" if request.address == "auto" else f"at {request.address}"
        reason = " ".join(str(error).split())  # The message of a version mismatch has seven lines.
        raise _Unreachable(f"the Ray cluster {where} cannot be used: {reason}") from error
    return ray


def _ensure_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_TIMEOUT).close()
    except OSError as error:
        raise _Unreachable(f"no Ray cluster at {address}: {error}") from error


def _serve(connection: Connection, ray: Any) -> None:
    """Handle messages until the controller closes the connection."""
    from pytest_accel.features.ray.ray_places import Places

    def send(message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The next `recv` ends the loop.
            connection.send_bytes(encode(message))

    places = Places(send, lambda: _can_scale(ray))
    send(Connected(places.nodes, _can_scale(ray)))
    step("is connected; the cluster has %d machines", len(places.nodes))
    while True:
        while connection.poll(places.poll_interval):
            try:
                data = connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                step("ends: the controller has closed the connection")
                places.close()
                return
            _handle(decode(data, ToHelper), places)
        places.poll()


def _handle(message: ToHelper, places: Places) -> None:
    match message:
        case RequestPlace(request_id, demand):
            places.request(request_id, demand)
        case ReleasePlace(request_id):
            places.release(request_id)
        case StartAgent(number, invitation):
            step("starts the agent of machine %d", number)
            places.start_agent(number, invitation)
        case StopAgent(number):
            step("stops the agent of machine %d", number)
            places.stop_agent(number)


def _can_scale(ray: Any) -> bool:
    """Return whether an autoscaler can add nodes to the cluster.

    Ray's monitor of a cluster without an autoscaler calls the type of each node ``node_ID``. There is no public
    function for this. The sources are those of ``ray status``: the report of version 1 of the autoscaler, and the state
    of version 2, in which the counter `autoscaler_version` is 0 if there is no such autoscaler.
    """
    status = import_module("ray.experimental.internal_kv")._internal_kv_get(b"__autoscaling_status")
    report = json.loads(status).get("autoscaler_report") if status is not None else None
    types = (report.get("node_type_mapping") if report is not None else None) or {}
    sdk = import_module("ray.autoscaler.v2.sdk")
    state = sdk.get_cluster_status(ray.get_runtime_context().gcs_address)
    if state.stats.autoscaler_version not in (None, "0"):
        types |= {node.node_id: node.ray_node_type_name for node in (*state.active_nodes, *state.idle_nodes)}
    return any(kind != f"node_{node}" for node, kind in types.items())
