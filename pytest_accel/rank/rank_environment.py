"""Environment variables and random states of a rank."""

from __future__ import annotations

import os
import sys
from multiprocessing import process

import psutil

from pytest_accel.core.launcher_env import OWN_RUN
from pytest_accel.messages.world_spec import LOOPBACK, WorldSpec, host_of, loopback_interface
from pytest_accel.rank import flight_recorder

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""The variable that tells torch, as under torchrun, that a store already listens at `MASTER_PORT`."""


def environment(spec: WorldSpec, rank: int, port: int) -> dict[str, str | None]:
    """Return the variables of `identity`, and the variables that only the process group needs."""
    return {
        **identity(spec, rank, port),
        **{name: os.environ.get(name, value) for name, value in flight_recorder.VARIABLES.items()},
        # Without it, gloo looks up the host's name, which fails or blocks on machines without a working resolver.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or _interface_of(spec, rank),
    }


def identity(spec: WorldSpec, rank: int, port: int) -> dict[str, str]:
    """Return the variables that ``env://`` and torchrun define."""
    size = str(spec.key.group_size)
    neighbours = spec.neighbours(rank)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": size,
        # If each rank has its own mask, its device is number 0, as under torchrun's --virtual-local-rank.
        "LOCAL_RANK": "0" if spec.key.visible == "rank" else str(neighbours.index(rank)),
        "LOCAL_WORLD_SIZE": size if spec.key.fake_size is not None else str(len(neighbours)),
        "GROUP_RANK": str(spec.machine_rank(rank)),
        "GROUP_WORLD_SIZE": str(spec.machine_count),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": host_of(spec),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"{OWN_RUN}{spec.world}",
        AGENT_STORE: "True",
    }


def _interface_of(spec: WorldSpec, rank: int) -> str | None:
    """Return the network interface that has the address of `rank`; None if this machine has no such interface."""
    address = spec.addresses[rank] if spec.addresses else LOOPBACK
    if address == LOOPBACK:
        return loopback_interface()
    for name, known in psutil.net_if_addrs().items():
        # A link-local address has its interface as a suffix after "%".
        if any(one.address.partition("%")[0] == address for one in known):
            return name
    return None


def reseed() -> None:
    """Give this process random states of its own, as a new interpreter has; ranks are forked with the same states.

    Python reseeds `random` in each fork. The generators of devices are made with their runtimes, in ranks only.
    """
    # With the same key, a rank could connect to other ranks' managers of `multiprocessing` without having their keys.
    process.current_process().authkey = os.urandom(32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
