"""A rank's store, process group and what torch knows of them. Runs in ranks only, where torch may be imported."""

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
PATIENCE = timedelta(hours=1)
"""For the group's own waits. Long, since the driver decides what is a hang, and takes the stacks first."""
_END_PATIENCE = timedelta(seconds=5)
"""How long rank 0 keeps the store for others at its end: less than a retired world has for its session fixtures."""


class Meeting(NamedTuple):
    """Where a world's ranks meet: a port of the machine of rank 0."""

    port: int
    listening: socket.socket | None
    """The socket that is bound to it, for rank 0; others may have it too, where they come from the same fork server."""


def prepare(context: RankContext, meeting: Meeting) -> None:
    """Open the world's store and, unless the mark says ``init=False``, its default process group."""
    import torch
    import torch.distributed as dist

    spec, rank = context.spec, context.rank
    port, listening = meeting
    host = host_of(spec)
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        dist.set_debug_level_from_env()  # It was read when torch was imported, in the fork server.
    if rank == 0:
        assert listening is not None
        store = dist.TCPStore(
            host, port, spec.ranks, True, PATIENCE, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    else:
        if listening is not None:
            listening.close()
        store = dist.TCPStore(host, port, spec.ranks, False, PATIENCE, wait_for_workers=False)
    context.store = dist.PrefixStore("accel", store)
    context.signed_store = SignedStore(context.store, spec.secret, f"{host}:{port}")
    if spec.addresses:
        context.signed_store.set(f"shares/{rank}", b"" if context.session.shared else socket.gethostname().encode())
    device = torch.device(context.torch_device)
    # Not every module has a device to choose (mps has one).
    if choose := getattr(_module_of(context.torch_device), "set_device", None):
        choose(device)
    _serve_rendezvous(context, port)
    _let_children_serve()
    if spec.init:
        watch(context)
        backend = spec.backend or context.vendor.backend or dist.get_default_backend_for_device(device)
        _check_backend(backend)
        dist.init_process_group(
            backend, store=dist.PrefixStore("world", store), rank=rank, world_size=spec.ranks, timeout=PATIENCE
        )
        context.default_group = world = dist.group.WORLD
        assert world is not None
        context.kept_groups.add(world.group_name)


def watch(context: RankContext) -> None:
    """Have a thread for the record of collectives, once there may be some: a process with threads is bad to fork."""
    if not context.watched:
        context.watched = True
        path = flight_path(context.session.directory, context.spec.world, context.rank)
        flight_recorder.watch(path, partial(flight_record, context))


def limit_threads() -> None:
    """As many threads as ``OMP_NUM_THREADS`` says: libgomp has read it before this process was forked."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))


def limit_memory(context: RankContext) -> None:
    """Let this rank have no more memory of each of its devices than its share, where torch can see to that."""
    import torch

    for device in context.own:
        name = torch.device(context.torch_name(device))
        limit = getattr(_module_of(str(name)), "set_per_process_memory_fraction", None)
        if limit is not None:
            fraction = shares.fraction(context.spec.share, device)
            # Apple's has one device and takes no other argument.
            limit(fraction) if name.type == "mps" else limit(fraction, name)


def _check_backend(backend: str) -> None:
    """ValueError, with what to do, for a backend that this torch does not have.

    ``ccl`` is registered by importing its package (github.com/intel/torch-ccl, whose development has ended), the others
    by how torch was built.
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
            remedy = "nothing that is imported here has registered it"
            if packages:
                remedy = f"install {packages[0]}"
            elif name in dist.Backend.backend_list:
                remedy = f"a torch that is built with {name} has it"
            raise ValueError(
                f"backend {name!r} is not available in torch {torch.__version__}: {remedy}, or take one of {here}"
            )


def _serve_rendezvous(context: RankContext, port: int) -> None:
    """Let the groups that tests make at an address, the world's `port` or one of their own, meet on the world's store.

    `TORCHELASTIC_USE_AGENT_STORE` makes every rank a client, which would wait at an address where nobody serves. Were
    rank 0 to serve there, two worlds could not use the same address at a time, and a rank that makes its next group
    before rank 0 has ended the last one would read the old group's keys. So each group has keys of its own: those of
    its port, its size and its turn, and for a loopback address of the machine.

    Code that sets the variable to anything else, as is done for a group with processes that are no ranks of this world,
    gets torch's own store at its address.
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
            # Other processes take part. At the world's own port they meet as clients, since it is served.
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
    """Hide the agent's store from the processes that `multiprocessing` starts anew: they make groups at their address.

    Those that it forks have what :func:`_serve_rendezvous` has replaced.
    """
    start = util.spawnv_passfds

    def start_without(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        with _without_agent_store():
            return start(path, args, passfds)

    util.spawnv_passfds = start_without


def torch_devices(names: Sequence[str]) -> list[torch.device]:
    """torch's own objects for its names of devices."""
    import torch

    return [torch.device(name) for name in names]


def test_store(context: RankContext) -> Store:
    """A store whose keys are the running test's own."""
    import torch.distributed as dist

    assert context.store is not None
    return dist.PrefixStore(f"test/{context.tests}", context.store)


def world_store(context: RankContext) -> Store:
    """Return a store whose keys live as long as the world, apart from those of its tests."""
    import torch.distributed as dist

    assert context.store is not None
    return dist.PrefixStore("world", context.store)


def end_together(context: RankContext) -> None:
    """Keep the store until the other ranks need it no more: their session fixtures may still use it at their end.

    It ends with rank 0, which waits for the others, but not for one that hangs or has died.
    """
    store = context.signed_store
    assert store is not None
    with contextlib.suppress(RuntimeError):  # The process of rank 0 has ended, or another rank's has.
        if context.rank:
            store.set(f"ended/{context.rank}", b"")
        elif context.spec.ranks > 1:
            store.wait([f"ended/{rank}" for rank in range(1, context.spec.ranks)], _END_PATIENCE)


def apart(context: RankContext) -> list[str]:
    """The machines that share no file system with the driver's, as the ranks there have found."""
    __tracebackhide__ = True
    assert context.signed_store is not None
    ranks = range(context.spec.ranks) if context.spec.addresses else ()
    return sorted({name for rank in ranks if (name := context.signed_store.get(f"shares/{rank}").decode())})


def make_mesh(context: RankContext, shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    """A mesh over the ranks' devices, whose groups the world keeps."""
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
    """The names of this rank's process groups."""
    return {str(group.group_name) for group in _groups()}


def _is_numbered_as_its_world(context: RankContext) -> bool:
    """Return whether torch's ranks are the world's, which those of a group that some of them have made are not."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return False
    if dist.group.WORLD is context.default_group:
        return True
    return (dist.get_rank(), dist.get_world_size()) == (context.rank, context.spec.ranks)


def members() -> dict[str, tuple[int, ...]]:
    """The ranks of each group that this rank belongs to, by the group's name."""
    import torch.distributed as dist

    return {_name(group): tuple(dist.get_process_group_ranks(group)) for group in _groups()}


def flight_record(context: RankContext) -> dict[str, object]:
    """Return torch's record of this rank's collectives, the members and numbers of its groups, and its place.

    It has no collectives if the ranks of the default group are not numbered as those of the world.
    """
    from torch._C import _distributed_c10d

    if not _is_numbered_as_its_world(context):
        return {"entries": [], "place": place_of_main_thread()}
    # torch has no public name for it: its own analyzer (torch.distributed.flight_recorder) reads the same record.
    record = json.loads(_distributed_c10d._dump_fr_trace_json(True, False))  # type: ignore[attr-defined]
    numbers = {name: number for name, (_, number) in collectives(context).items()}
    return {**record, "members": members(), "numbers": numbers, "place": place_of_main_thread()}


def collectives(context: RankContext) -> dict[str, tuple[tuple[int, ...], int]]:
    """For each group that this rank belongs to: its members' ranks and the number of collectives issued in it.

    Each group numbers its collectives by itself; gloo and nccl do, other backends may not, and are left out. So are
    groups whose ranks are not the world's: those of one name are not one group.
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
    """How many groups this rank has numbered: torch names the next by it, the same way on every rank."""
    import torch.distributed as dist

    return dist.distributed_c10d._world.group_count if dist.is_available() else 0


class LeftGroups(NamedTuple):
    """The process groups that a test has left."""

    lines: tuple[str, ...] = ()
    """What is told of them."""
    harm: str | None = None
    """Why the next test cannot have this process; None: it can."""
    endable: bool = False
    """Whether there are some for :func:`end_left_groups`."""


def left_groups(context: RankContext) -> LeftGroups:
    """What the test has left.

    Nothing is told of a device mesh's, which torch gives nobody a way to destroy. `end_left_groups` ends those that
    can be ended without the other ranks, and whose names are not used once more: torch numbers some (`_world`), and
    derives the others from their ranks (`_hash_ranks_to_str`).
    """
    import torch.distributed as dist

    if context.default_group is not None and (
        not dist.is_initialized() or dist.group.WORLD is not context.default_group
    ):
        return LeftGroups(harm="the test destroyed or replaced the world's default process group")
    left = _left(context)
    if not left:
        return LeftGroups()
    told = [_name(group) for group in left if not group.group_desc.startswith("mesh_")]
    lines = (f"left {group_label(*told)}",) if told else ()
    lasting = [_name(group) for group in left if not _can_be_ended(group)]
    return LeftGroups(lines, f"the test left {group_label(*lasting)}" if lasting else None, endable=True)


def _left(context: RankContext) -> list[ProcessGroup]:
    return [group for group in _groups() if str(group.group_name) not in context.kept_groups]


def _can_be_ended(group: ProcessGroup) -> bool:
    import torch.distributed as dist

    backends = {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")}
    return str(group.group_name).isdigit() and backends <= {"gloo", "fake"}


def end_left_groups(context: RankContext) -> None:
    """End what the last test has left: not before all ranks have come to its end, since one may still read from it."""
    import torch.distributed as dist

    left = _left(context)
    if dist.group.WORLD in left:
        left = [dist.group.WORLD]  # The others go with it.
    for group in left:
        dist.destroy_process_group(group)


def allocated_memory(context: RankContext) -> dict[str, int]:
    """Bytes that torch has allocated on each of this rank's devices, by its name; without those that it cannot say."""
    sizes = {}
    for device in context.own:
        name = context.torch_name(device)
        module = _memory_of(name)
        if hasattr(module, "memory_allocated"):
            sizes[name] = int(module.memory_allocated(name))
    return sizes


def wait_for_devices(context: RankContext) -> None:
    """Wait for all that has been started on this rank's devices; RuntimeError where some of it has failed.

    What a device finds wrong (an index out of bounds in a kernel) is told by the next call that waits for it: without
    this, perhaps by another test's.
    """
    __tracebackhide__ = True
    for device in context.own:
        name = context.torch_name(device)
        if name.startswith("cpu"):
            return
        module = _module_of(name)
        # A runtime that the test has not started is not started for this.
        if getattr(module, "is_initialized", lambda: True)() and hasattr(module, "synchronize"):
            # Apple's has one device and takes no argument.
            try:
                module.synchronize() if name == "mps" else module.synchronize(name)
            except RuntimeError as error:
                raise RuntimeError(f"something that the test started on {name} has failed: {error}") from None


def _memory_of(device: str) -> Any:
    if device.startswith("cpu"):
        return None
    return _module_of(device)


def _module_of(device: str) -> Any:
    """torch's module for a device, such as `torch.cuda`; None where it has none (xla)."""
    import torch

    return getattr(torch, torch.device(device).type, None)


def reset_peak_memory(device: str) -> None:
    """Start counting the peak of this test."""
    module = _memory_of(device)
    if module is not None and hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats()


def peak_memory(device: str) -> int | None:
    """Bytes that torch has had allocated on `device` at most during the test; None where torch does not count."""
    module = _memory_of(device)
    if module is None or not hasattr(module, "max_memory_allocated"):
        return None
    return int(module.max_memory_allocated())
