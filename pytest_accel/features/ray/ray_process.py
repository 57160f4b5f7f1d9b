"""The program of the helper process that talks to Ray for the controller, which never imports ray.

In the controller, tests that use Ray themselves would share this connection, and Ray would end the process if the
cluster's head is lost.

The helper is what Ray calls a driver: Ray removes its placement groups and actors when it exits. The helper exits when
its connection to the controller is closed, or when the controller exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import socket
from importlib import import_module
from traceback import format_exc
from typing import Any

from pytest_accel.core import log, processes
from pytest_accel.core.log import step
from pytest_accel.features.ray.ray_messages import Connected, HelperFailed, ToHelper
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.struct_messages import LENGTH, decode, encode, frame

_REACH_TIMEOUT = 5.0
"""Seconds in which the cluster's address must accept a connection; Ray would try for minutes."""
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds after which Ray ends this process if the cluster's head is lost; Ray's default is a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}


def main(descriptor: int, parent: int, address: str, rootdir: str) -> None:
    """Serve the controller, the process `parent`, over the connection with this `descriptor`.

    `address` is the cluster's: ``HOST:PORT``, or ``auto`` for the cluster of this machine. `rootdir` is the suite's.
    """
    processes.die_with_parent(parent)
    log.start_here("Ray client")
    asyncio.run(_serve(socket.socket(fileno=descriptor), address, rootdir))


async def _serve(connection: socket.socket, address: str, rootdir: str) -> None:
    """Handle messages until the controller closes the connection."""
    environ = dict(os.environ)  # Ray changes it.
    reader, writer = await asyncio.open_connection(sock=connection)

    def send(message: object) -> None:
        writer.write(frame(encode(message)))

    def fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the helper because of an error in a task: the next read raises it."""
        if not context.keys() & {"task", "future"}:  # With these, asyncio names a failure that nobody waits for.
            reader.set_exception(context.get("exception") or RuntimeError(context["message"]))

    asyncio.get_running_loop().set_exception_handler(fail)
    try:
        step("connects to the Ray cluster: %s", address)
        ray = _connect(address)
        from pytest_accel.features.ray.ray_places import Places

        can_scale = _can_scale(ray)
        places = Places(send, rootdir, environ, can_scale=can_scale)
        send(Connected(tuple(places.nodes.values()), can_scale))
        step("is connected; the cluster has %d machines", len(places.nodes))
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                places.handle(decode(await reader.readexactly(length), ToHelper))
        except (asyncio.IncompleteReadError, ConnectionError):
            step("ends: the controller has closed the connection")
            await places.close()
            ray.shutdown()
    except PlaceError as error:
        step("ends: %s", error)
        send(HelperFailed(str(error)))
    except Exception:
        send(HelperFailed(f"the process that talks to Ray has ended with an error:\n{format_exc()}"))
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def _connect(address: str) -> Any:
    """Return the module ray, connected to the cluster; raise PlaceError if it cannot be reached."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _REACH_TIMEOUT).close()
        except OSError as error:
            raise PlaceError(f"no Ray cluster at {address}: {error}") from error
    os.environ.update(_SETTINGS)
    ray = import_module("ray")
    where = "of this machine" if address == "auto" else f"at {address}"
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except Exception as error:  # ConnectionError, RuntimeError and others, as for a mismatch of versions.
        if address == "auto" and isinstance(error, ConnectionError):
            raise PlaceError(
                f"no Ray cluster runs on {platform.node()}; start one (ray start --head), or join one "
                "(ray start --address=HOST:PORT)"
            ) from error
        reason = " ".join(str(error).split())  # The message of a version mismatch has seven lines.
        raise PlaceError(f"the Ray cluster {where} cannot be used: {reason}") from error
    return ray


def _can_scale(ray: Any) -> bool:
    """Return whether an autoscaler can add nodes to the cluster.

    Ray's monitor of a cluster without an autoscaler calls the type of each node ``node_ID``. There is no public
    function for this. The sources are the same as for ``ray status``: the report of version 1 of the autoscaler, and
    the state of version 2, in which the counter `autoscaler_version` is 0 if there is no such autoscaler.
    """
    status = import_module("ray.experimental.internal_kv")._internal_kv_get(b"__autoscaling_status")
    report = json.loads(status).get("autoscaler_report") if status is not None else None
    types = (report.get("node_type_mapping") if report is not None else None) or {}
    sdk = import_module("ray.autoscaler.v2.sdk")
    state = sdk.get_cluster_status(ray.get_runtime_context().gcs_address)
    if state.stats.autoscaler_version not in (None, "0"):
        types |= {node.node_id: node.ray_node_type_name for node in (*state.active_nodes, *state.idle_nodes)}
    return any(kind != f"node_{node}" for node, kind in types.items())
