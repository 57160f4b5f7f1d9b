"""A node provider for Ray's autoscaler that starts nodes on this machine.

Only Ray imports this module, in the monitor process of a cluster. Tests do not, since importing ray changes sys.path.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from tests.features.ray.autoscaled_machines import HEAD, WORKER, AutoscaledMachines, identity
from tests.features.ray.ray_machines import HEAD_HOST, StartedNode, join_options, start_node


class ProcessProvider(NodeProvider):  # type: ignore[misc]
    """A node provider that starts each node as a process of this machine. The id of a node is its address."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._folder = Path(provider_config["folder"])
        self._tags: dict[str, dict[str, str]] = {
            HEAD_HOST: {
                TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
                TAG_RAY_USER_NODE_TYPE: HEAD,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            }
        }
        self._started: dict[str, StartedNode] = {}
        self._last_number = 100

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        # Version 2 calls this while `create_node` runs in another thread.
        return [host for host, tags in list(self._tags.items()) if tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        return node_id in self._tags

    def is_terminated(self, node_id: str) -> bool:
        return node_id not in self._tags

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._tags[node_id]

    def internal_ip(self, node_id: str) -> str:
        return node_id

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        for _ in range(count):
            self._last_number += 1
            host = f"127.0.0.{self._last_number}"
            environment = {**os.environ, **identity(WORKER, host)}
            options = join_options(self._folder, AutoscaledMachines.GPUS)
            self._started[host] = start_node(self._folder, host, self._last_number, environment, options)
            # Version 2 of the autoscaler takes a node that joins before it is listed here for one that it has not asked
            # for, and stops with "Invalid status transition" if there are too many then.
            self._tags[host] = {**tags, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}
            self._started[host].wait_ready()  # Nodes that start at the same time may choose the same names for files.

    def terminate_node(self, node_id: str) -> None:
        del self._tags[node_id]
        self._started.pop(node_id).kill()
