"""A provider for Ray's autoscaler whose machines are nodes on this machine; it runs in the monitor of the cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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

from tests.faults.conftest import eventually
from tests.nodes.ray_machines import HEAD_HOST, RayMachines, StartedNode, join_options, start_node

HEAD, WORKER = "head", "worker"
_COMMANDS = (
    "cluster_synced_files",
    "initialization_commands",
    "setup_commands",
    *(f"{node}_{what}_commands" for node in ("head", "worker") for what in ("setup", "start_ray")),
)
"""The parts of a configuration that say how the software comes to a node."""
ROOT = Path(__file__).parents[2]


class GrowingMachines(RayMachines):
    """A cluster whose autoscaler adds up to two nodes with `GPUS` GPUs each."""

    GPUS = 2

    def __init__(self, environment: Mapping[str, str]) -> None:
        # PYTHONPATH is for the module of the provider.
        super().__init__({**environment, **_identity(HEAD, HEAD_HOST), "PYTHONPATH": str(ROOT)})

    def wait_for_autoscaler(self) -> None:
        """Wait until the autoscaler knows the cluster: before that, sessions take it for one without an autoscaler."""
        log = self.folder / "ray" / "session_latest" / "logs" / "monitor.log"
        # The first text is of version 1, the second of version 2.
        texts = "Autoscaler status:", "->RAY_RUNNING"
        eventually("a report of the autoscaler", lambda: any(text in log.read_text() for text in texts))

    def _head_options(self) -> tuple[str, ...]:
        config = {
            "cluster_name": "growing",
            "max_workers": 2,
            "idle_timeout_minutes": 60,
            "upscaling_speed": 10,
            "auth": {},
            "file_mounts": {},
            **dict.fromkeys(_COMMANDS, ()),
            "provider": {
                "type": "external",
                "module": f"{__name__}.{ProcessProvider.__name__}",
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "foreground_node_launch": True,
                "folder": str(self.folder),
            },
            "available_node_types": {
                HEAD: {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 0},
                WORKER: {"resources": {"CPU": 4, "GPU": self.GPUS}, "node_config": {}, "max_workers": 2},
            },
            "head_node_type": HEAD,
        }
        path = self.folder / "autoscaler.yaml"
        path.write_text(json.dumps(config))  # JSON is a part of YAML.
        return (f"--autoscaling-config={path}",)


class ProcessProvider(NodeProvider):  # type: ignore[misc]
    """Starts a node as a process of this machine where another provider would rent a machine.

    The ids of nodes are their addresses.
    """

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
        self._last = 100

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        return [host for host, tags in self._tags.items() if tag_filters.items() <= tags.items()]

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
            self._last += 1
            host = f"127.0.0.{self._last}"
            environment = {**os.environ, **_identity(WORKER, host)}
            options = join_options(self._folder, GrowingMachines.GPUS)
            self._started[host] = start_node(self._folder, host, self._last, environment, options)
            self._tags[host] = {**tags, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}

    def terminate_node(self, node_id: str) -> None:
        del self._tags[node_id]
        self._started.pop(node_id).kill()


def _identity(kind: str, host: str) -> dict[str, str]:
    """Return the variables by which the second version of the autoscaler recognizes a node."""
    return {"RAY_NODE_TYPE_NAME": kind, "RAY_CLOUD_INSTANCE_ID": host}
