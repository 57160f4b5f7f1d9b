"""A Ray cluster on this machine whose autoscaler adds nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.deadline import eventually
from tests.features.ray.ray_machines import HEAD_HOST, RayMachines

HEAD, WORKER = "head", "worker"
_COMMANDS = (
    "cluster_synced_files",
    "initialization_commands",
    "setup_commands",
    *(f"{node}_{what}_commands" for node in ("head", "worker") for what in ("setup", "start_ray")),
)
"""The keys of a configuration for the commands that install and start the software on a node."""
ROOT = Path(__file__).parents[3]


class AutoscaledMachines(RayMachines):
    """A cluster whose autoscaler adds up to two nodes with `GPUS` GPUs each."""

    GPUS = 2

    def __init__(self, environment: Mapping[str, str]) -> None:
        # The autoscaler imports the provider's module from PYTHONPATH.
        super().__init__({**environment, **identity(HEAD, HEAD_HOST), "PYTHONPATH": str(ROOT)})

    def wait_for_autoscaler(self) -> None:
        """Wait until the autoscaler knows the cluster. Before that, sessions see no autoscaler."""
        log = self.folder / "ray" / "session_latest" / "logs" / "monitor.log"
        # The first text is written by version 1 of the autoscaler, the second by version 2.
        texts = "Autoscaler status:", "->RAY_RUNNING"
        # The head is ready before the process of the autoscaler has made the file.
        eventually(
            "a report of the autoscaler", lambda: log.exists() and any(text in log.read_text() for text in texts)
        )

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
                "module": "tests.features.ray.ray_autoscaler.ProcessProvider",
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


def identity(kind: str, host: str) -> dict[str, str]:
    """Return the environment variables by which version 2 of the autoscaler recognizes a node."""
    return {"RAY_NODE_TYPE_NAME": kind, "RAY_CLOUD_INSTANCE_ID": host}
