"""Calls of the kernel: a rank is prepared for tests in a fake process group, and calls a test."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pytest_accel.core import torch_api
from pytest_accel.features.fake_group import refused_calls
from pytest_accel.rank import process_group

if TYPE_CHECKING:
    from torch.distributed import Store

    from pytest_accel.core.role import StorePort
    from pytest_accel.rank.context import RankContext


def around_call(context: RankContext) -> AbstractContextManager[None]:
    return refused_calls.failing_after_refusal()


def open_fake_group(context: RankContext, store_port: StorePort) -> Store:
    """Initialise the fake process group, unless the mark says ``init=False``, and have torch refuse what needs a peer.

    Return the store of the group. Raise :class:`process_group.BackendError` if torch lacks the backend.
    """
    import torch.distributed as dist

    key = context.spec.key
    try:
        store = torch_api.make_fake_store(refused_calls.refuse_store)
    except ImportError as error:
        raise process_group.BackendError(
            f'backend="fake" is not available in torch {torch_api.version()}: {error}; use another torch or backend'
        ) from error
    process_group.open_folder_store(context, store_port)
    refused_calls.install(key)
    dist.set_debug_level(dist.DebugLevel.OFF)  # Else torch compares the collectives of all ranks through the store.
    # Another backend would wait at this address for ranks that do not exist.
    torch_api.replace_store_creation(lambda *args, **named: store)
    if key.init:
        dist.init_process_group(key.backend, store=store, rank=context.rank, world_size=key.group_size)
        context.default_group = world = dist.group.WORLD
        assert world is not None
        context.kept_groups.add(world.group_name)
    return store
