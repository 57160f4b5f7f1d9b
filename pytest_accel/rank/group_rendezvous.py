"""Rendezvous of process groups that tests create. They use the world's store, whichever address a test names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import util
from typing import TYPE_CHECKING, Any

from pytest_accel.core import torch_api
from pytest_accel.core.role import host_of
from pytest_accel.rank import group_state
from pytest_accel.rank.rank_environment import AGENT_STORE

if TYPE_CHECKING:
    from torch.distributed import Store

    from pytest_accel.rank.context import RankContext

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def use_world_store(context: RankContext, port: int) -> None:
    """Make process groups that tests create at an address (host and port) use the world's store for their rendezvous.

    `TORCHELASTIC_USE_AGENT_STORE` makes every rank a client, so ranks would wait at an address where no store is
    served. If rank 0 served a store there, two worlds could not use the same address at the same time, and a rank that
    creates its next group before rank 0 has destroyed the previous one would read the old group's keys. So each group
    has its own keys in the world's store: by port, size, number of the group at this port and, for some ranks at a
    loopback address, machine.

    Code that sets the variable to another value, for a group with processes that are not ranks of this world, gets
    torch's own store at its address, except at the world's own `port`.
    """
    import torch.distributed as dist

    def create(
        original: Callable[..., Store],
        hostname: str,
        named_port: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        *options: Any,
        **named: Any,
    ) -> Store:
        agent = os.environ.get(AGENT_STORE) == "True"
        if world_size > context.spec.ranks or not (agent or named_port == port):
            # The group has other processes. At the world's own port all are clients, because its store is served there.
            with contextlib.nullcontext() if named_port == port else _without_agent_store():
                return original(hostname, named_port, rank, world_size, timeout, *options, **named)
        group_state.start_recorder(context)
        served = dist.TCPStore(host_of(context.spec), port, None, False, timeout, wait_for_workers=False)
        node = context.spec.node_of(context.rank) if hostname in _LOOPBACK and world_size < context.spec.ranks else ""
        place = f"init/{context.tests}/{node}/{named_port}/{world_size}"
        turn = served.add(f"{place}/turns/{rank}", 1)
        return dist.PrefixStore(f"{place}/{turn}", served)

    torch_api.replace_store_creation(create)


def let_children_serve() -> None:
    """Unset `AGENT_STORE` in processes that `multiprocessing` spawns, so that one of them can serve a store.

    Processes that `multiprocessing` forks inherit the function that :func:`use_world_store` has replaced.
    """
    start = util.spawnv_passfds

    def start_without(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        with _without_agent_store():
            return start(path, args, passfds)

    util.spawnv_passfds = start_without


@contextlib.contextmanager
def _without_agent_store() -> Iterator[None]:
    """Unset `AGENT_STORE` in the ``with`` block, so that torch uses a store of its own."""
    before = os.environ.pop(AGENT_STORE, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[AGENT_STORE] = before
