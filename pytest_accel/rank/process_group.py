"""A rank's store, process groups and devices in torch. Runs in ranks only, where torch may be imported."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import util
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_accel.core.frames import place_of_main_thread
from pytest_accel.core.paths import flight_path
from pytest_accel.core.world_key import backend_names
from pytest_accel.hardware import shares
from pytest_accel.rank import flight_recorder
from pytest_accel.rank.collectives import DEFAULT_GROUP, group_label
from pytest_accel.rank.rank_environment import AGENT_STORE, host_of
from pytest_accel.rank.signed_store import SignedStore

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_accel.rank.context import RankContext

_PLUGIN_BACKENDS = {"ccl": ("oneccl_bindings_for_pytorch", "torch_ccl")}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
GROUP_TIMEOUT = timedelta(hours=1)
"""torch's timeout for the process group. Long, because the driver detects hangs, and takes the stacks first."""
_END_TIMEOUT = timedelta(seconds=5)
"""How long rank 0 keeps the store for the other ranks when it exits: less than a retired world's time to exit."""


class StorePort(NamedTuple):
    """The port of the world's store, on the machine of rank 0."""

    port: int
    listening: socket.socket | None
    """The socket bound to the port, which rank 0 uses. Other ranks from the same fork server may have a copy."""


def prepare(context: RankContext, store_port: StorePort) -> None:
    """Open the world's store and, unless the mark says ``init=False``, its default process group."""
    import torch
    import torch.distributed as dist

    spec, rank = context.spec, context.rank
    port, listening = store_port
    host = host_of(spec)
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        dist.set_debug_level_from_env()  # torch read the variable when it was imported, in the fork server.
    if rank == 0:
        assert listening is not None
        store = dist.TCPStore(
            host, port, spec.ranks, True, GROUP_TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    else:
        if listening is not None:
            listening.close()
        store = dist.TCPStore(host, port, spec.ranks, False, GROUP_TIMEOUT, wait_for_workers=False)
    context.store = dist.PrefixStore("accel", store)
    context.signed_store = SignedStore(context.store, spec.secret, f"{host}:{port}")
    if spec.addresses:
        context.signed_store.set(f"shares/{rank}", b"" if context.session.shared else socket.gethostname().encode())
    device = torch.device(context.torch_device)
    # Not every module has set_device: mps has only one device.
    if choose := getattr(_module_of(context.torch_device), "set_device", None):
        choose(device)
    _serve_rendezvous(context, port)
    _let_children_serve()
    if spec.key.init:
        watch(context)
        backend = spec.key.backend or context.vendor.backend or dist.get_default_backend_for_device(device)
        _check_backend(backend)
        dist.init_process_group(
            backend, store=dist.PrefixStore("world", store), rank=rank, world_size=spec.ranks, timeout=GROUP_TIMEOUT
        )
        context.default_group = world = dist.group.WORLD
        assert world is not None
        context.kept_groups.add(world.group_name)


def watch(context: RankContext) -> None:
    """Start the thread for the record of collectives, unless it runs.

    Call this before the first process group only, not earlier: a process with threads is unsafe to fork.
    """
    if not context.watched:
        context.watched = True
        path = flight_path(context.session.directory, context.spec.world, context.rank)
        flight_recorder.watch(path, partial(flight_record, context))


def limit_threads() -> None:
    """Set torch's number of threads to ``OMP_NUM_THREADS``, which libgomp read before this process was forked."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))


def limit_memory(context: RankContext) -> None:
    """Limit this rank's memory on each of its devices to its share, for the types of devices for which torch can."""
    import torch

    for device in context.own:
        name = torch.device(context.torch_name(device))
        limit = getattr(_module_of(str(name)), "set_per_process_memory_fraction", None)
        if limit is not None:
            fraction = shares.fraction(context.spec.share, device)
            # mps has only one device, so its function does not take a device.
            limit(fraction) if name.type == "mps" else limit(fraction, name)


def _check_backend(backend: str) -> None:
    """Raise ValueError, with advice, if torch does not have a backend of `backend`.

    Importing its package registers ``ccl`` (github.com/intel/torch-ccl, which is no longer developed). torch's build
    determines the other backends.
    """
    import torch
    import torch.distributed as dist

    for name in backend_names(backend):
        packages = _PLUGIN_BACKENDS.get(name, ())
        for package in packages:
            if importlib.util.find_spec(package) is not None:
                importlib.import_module(package)
                break
        if not dist.is_backend_available(name):
            usable = set(dist.Backend.backend_list) - {"undefined", "fake"}
            here = ", ".join(sorted(one for one in usable if dist.is_backend_available(one)))
            remedy = "import the package that registers it"
            if packages:
                remedy = f"install {packages[0]}"
            elif name in dist.Backend.backend_list:
                remedy = f"use a torch that is built with {name}"
            raise ValueError(
                f"backend {name!r} is not available in torch {torch.__version__}: {remedy}, or use one of {here}"
            )


def _serve_rendezvous(context: RankContext, port: int) -> None:
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

    # torch.distributed has a function of the same name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous._create_c10d_store

    def create(
        hostname: str, at: int, rank: int, world_size: int, timeout: timedelta, *options: Any, **named: Any
    ) -> Store:
        agent = os.environ.get(AGENT_STORE) == "True"
        if world_size > context.spec.ranks or not (agent or at == port):
            # The group has other processes. At the world's own port all are clients, because its store is served there.
            with contextlib.nullcontext() if at == port else _without_agent_store():
                store: Store = original(hostname, at, rank, world_size, timeout, *options, **named)
                return store
        watch(context)
        served = dist.TCPStore(host_of(context.spec), port, None, False, timeout, wait_for_workers=False)
        node = context.spec.node_of(context.rank) if hostname in _LOOPBACK and world_size < context.spec.ranks else ""
        place = f"init/{context.tests}/{node}/{at}/{world_size}"
        turn = served.add(f"{place}/turns/{rank}", 1)
        return dist.PrefixStore(f"{place}/{turn}", served)

    rendezvous._create_c10d_store = create


@contextlib.contextmanager
def _without_agent_store() -> Iterator[None]:
    before = os.environ.pop(AGENT_STORE, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[AGENT_STORE] = before


def _let_children_serve() -> None:
    """Unset the variable for the agent's store in processes that `multiprocessing` spawns, so that they can serve one.

    Processes that it forks inherit the function that :func:`_serve_rendezvous` has replaced.
    """
    start = util.spawnv_passfds

    def start_without(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        with _without_agent_store():
            return start(path, args, passfds)

    util.spawnv_passfds = start_without


def torch_devices(names: Sequence[str]) -> list[torch.device]:
    """Return the `torch.device` for each name."""
    import torch

    return [torch.device(name) for name in names]


def test_store(context: RankContext) -> Store:
    """Return a store with keys that belong to the running test only."""
    import torch.distributed as dist

    assert context.store is not None
    return dist.PrefixStore(f"test/{context.tests}", context.store)


def world_store(context: RankContext) -> Store:
    """Return a store with keys that last as long as the world, separate from those of its tests."""
    import torch.distributed as dist

    assert context.store is not None
    return dist.PrefixStore("world", context.store)


def end_together(context: RankContext) -> None:
    """Wait in rank 0 until the other ranks have ended their sessions; their session fixtures may still use the store.

    The store exits with rank 0, so rank 0 waits for the others, but no longer than a timeout, since one may hang.
    """
    store = context.signed_store
    assert store is not None
    with contextlib.suppress(RuntimeError):  # Rank 0 has exited, or another rank has not reached its end in time.
        if context.rank:
            store.set(f"ended/{context.rank}", b"")
        elif context.spec.ranks > 1:
            store.wait([f"ended/{rank}" for rank in range(1, context.spec.ranks)], _END_TIMEOUT)


def apart(context: RankContext) -> list[str]:
    """Return the names of the machines that do not share a file system with the driver's, as their ranks reported."""
    __tracebackhide__ = True
    assert context.signed_store is not None
    ranks = range(context.spec.ranks) if context.spec.addresses else ()
    return sorted({name for rank in ranks if (name := context.signed_store.get(f"shares/{rank}").decode())})


def make_mesh(context: RankContext, shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    """Return a device mesh over the ranks' devices. Its groups last as long as the world."""
    __tracebackhide__ = True
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    before = group_names()
    mesh = init_device_mesh(torch.device(context.torch_device).type, shape, mesh_dim_names=names)
    context.kept_groups |= group_names() - before
    return mesh


def _groups() -> list[ProcessGroup]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return []
    return list(dist.distributed_c10d._world.pg_map)


def _name(group: ProcessGroup) -> str:
    import torch.distributed as dist

    return DEFAULT_GROUP if group is dist.group.WORLD else str(group.group_name)


def group_names() -> set[str]:
    """Return the names of this rank's process groups."""
    return {str(group.group_name) for group in _groups()}


def _is_numbered_as_its_world(context: RankContext) -> bool:
    """Return whether torch numbers the ranks as the world does. It does not in a group that only some ranks created."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return False
    if dist.group.WORLD is context.default_group:
        return True
    return (dist.get_rank(), dist.get_world_size()) == (context.rank, context.spec.ranks)


def members() -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group to which this rank belongs, by the group's name."""
    import torch.distributed as dist

    return {_name(group): tuple(dist.get_process_group_ranks(group)) for group in _groups()}


def flight_record(context: RankContext) -> dict[str, object]:
    """Return torch's record of this rank's collectives, its groups' members and counts, and its place in the code.

    The record has no collectives if torch does not number the ranks as the world does.
    """
    from torch._C import _distributed_c10d

    if not _is_numbered_as_its_world(context):
        return {"entries": [], "place": place_of_main_thread()}
    # The function is not public, but torch's own analyzer (torch.distributed.flight_recorder) reads the same record.
    record = json.loads(_distributed_c10d._dump_fr_trace_json(True, False))  # type: ignore[attr-defined]
    numbers = {name: number for name, (_, number) in collectives(context).items()}
    return {**record, "members": members(), "numbers": numbers, "place": place_of_main_thread()}


def collectives(context: RankContext) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the ranks and the number of issued collectives of each group to which this rank belongs, by its name.

    Groups of backends that do not number collectives are left out; gloo and nccl number them. The result is empty if
    torch does not number the ranks as the world does: equal names do not mean the same group on all ranks then.
    """
    import torch.distributed as dist

    numbers: dict[str, tuple[tuple[int, ...], int]] = {}
    groups = _groups() if _is_numbered_as_its_world(context) else []
    world = dist.group.WORLD if groups else None
    for group in groups:
        try:
            number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        except RuntimeError:
            continue
        name = DEFAULT_GROUP if group is world else str(group.group_name)
        numbers[name] = (tuple(dist.get_process_group_ranks(group)), number)
    return numbers


def made() -> int:
    """Return how many groups torch has numbered in this rank. torch derives the name of the next group from it."""
    import torch.distributed as dist

    return dist.distributed_c10d._world.group_count if dist.is_available() else 0


class LeftGroups(NamedTuple):
    """The process groups that a test has not destroyed."""

    lines: tuple[str, ...] = ()
    """The text for the report."""
    kill_reason: str | None = None
    """Why this process must be killed after the test; None: no reason."""
    endable: bool = False
    """True if there are groups for :func:`end_left_groups`."""


def left_groups(context: RankContext) -> LeftGroups:
    """Return the groups that the test has not destroyed.

    The groups of a device mesh are not reported, because torch has no function to destroy them. A group is harmless if
    `end_left_groups` can destroy it without the other ranks and its name is not reused: torch numbers some groups
    (`_world`), and derives the names of the others from their ranks (`_hash_ranks_to_str`).
    """
    import torch.distributed as dist

    if context.default_group is not None and (
        not dist.is_initialized() or dist.group.WORLD is not context.default_group
    ):
        return LeftGroups(kill_reason="the test destroyed or replaced the world's default process group")
    left = _left(context)
    if not left:
        return LeftGroups()
    reported = [_name(group) for group in left if not group.group_desc.startswith("mesh_")]
    lines = (f"left {group_label(*reported)}",) if reported else ()
    lasting = [_name(group) for group in left if not _can_be_ended(group)]
    return LeftGroups(lines, f"the test left {group_label(*lasting)}" if lasting else None, endable=True)


def _left(context: RankContext) -> list[ProcessGroup]:
    return [group for group in _groups() if str(group.group_name) not in context.kept_groups]


def _can_be_ended(group: ProcessGroup) -> bool:
    import torch.distributed as dist

    backends = {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")}
    return str(group.group_name).isdigit() and backends <= {"gloo", "fake"}


def end_left_groups(context: RankContext) -> None:
    """Destroy the groups that the last test left. Call this only after all ranks have ended it: one may still read."""
    import torch.distributed as dist

    left = _left(context)
    if dist.group.WORLD in left:
        left = [dist.group.WORLD]  # Destroying the default group destroys all others.
    for group in left:
        dist.destroy_process_group(group)


def allocated_memory(context: RankContext) -> dict[str, int]:
    """Return the bytes that torch has allocated on each of this rank's devices, by torch's name of the device.

    Devices for which torch does not count are left out.
    """
    sizes = {}
    for device in context.own:
        name = context.torch_name(device)
        module = _memory_of(name)
        if hasattr(module, "memory_allocated"):
            sizes[name] = int(module.memory_allocated(name))
    return sizes


def wait_for_devices(context: RankContext) -> None:
    """Wait for all work on this rank's devices; raise RuntimeError if some of it has failed.

    The next call that waits for a device raises an error of earlier work, such as an index out of bounds in a kernel.
    Without this wait, that call may be in another test.
    """
    __tracebackhide__ = True
    for device in context.own:
        name = context.torch_name(device)
        if name.startswith("cpu"):
            return
        module = _module_of(name)
        # Do not initialise a runtime that the test has not used.
        if getattr(module, "is_initialized", lambda: True)() and hasattr(module, "synchronize"):
            # mps has only one device, so its function takes no argument.
            try:
                module.synchronize() if name == "mps" else module.synchronize(name)
            except RuntimeError as error:
                raise RuntimeError(f"something that the test started on {name} has failed: {error}") from None


def _memory_of(device: str) -> Any:
    if device.startswith("cpu"):
        return None
    return _module_of(device)


def _module_of(device: str) -> Any:
    """Return torch's module for a device, such as `torch.cuda`; None if it has none (xla)."""
    import torch

    return getattr(torch, torch.device(device).type, None)


def reset_peak_memory(device: str) -> None:
    """Start measuring the peak of the allocated memory on `device`."""
    module = _memory_of(device)
    if module is not None and hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats()


def peak_memory(device: str) -> int | None:
    """Return the peak of the bytes allocated by torch on `device` in the test; None if torch does not count them."""
    module = _memory_of(device)
    if module is None or not hasattr(module, "max_memory_allocated"):
        return None
    return int(module.max_memory_allocated())
