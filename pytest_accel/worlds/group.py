"""A rank's store, process group and what torch knows of them. Runs in ranks only, where torch may be imported."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlparse

from pytest_accel.hardware import shares
from pytest_accel.worlds import flight
from pytest_accel.worlds.files import flight_path
from pytest_accel.worlds.places import host_of
from pytest_accel.worlds.shape import backend_names

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_accel.worlds.rank import RankContext

_PLUGIN_BACKENDS = {"ccl": ("oneccl_bindings_for_pytorch", "torch_ccl")}
PATIENCE = timedelta(hours=1)
"""For the group's own waits. Long, since the driver decides what is a hang, and takes the stacks first."""


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
    if spec.addresses:
        context.store.set(f"shares/{rank}", "" if context.session.shared else socket.gethostname())
    device = torch.device(context.torch_device)
    # Not every module has a device to choose (mps has one).
    if choose := getattr(_module_of(context.torch_device), "set_device", None):
        choose(device)
    _serve_rendezvous(context, port)
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
        flight.watch(flight_path(context.session.directory, context.spec.world, context.rank), flight_record)


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
    """Let the test's own ``init_process_group`` calls meet on the world's store, each under keys of its own.

    torch's handler uses the same keys each time, so that a second call in one world reads the first one's addresses
    and fails; and without the agent's store it waits out its reconnect delay, 200 ms and more a call. The registry of
    handlers has no public way to replace one (`torch.distributed.rendezvous.register_rendezvous_handler` refuses).
    """
    import torch.distributed as dist

    # torch.distributed has a function of the same name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    calls: Counter[int] = Counter()

    def ours(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def handler(url: str, timeout: timedelta = PATIENCE, **options: Any) -> Iterator[Any]:
            target = urlparse(url)
            query = parse_qs(target.query)
            at = str(target.port or os.environ.get("MASTER_PORT"))
            rank = int(query.get("rank", [os.environ.get("RANK", "-1")])[0])
            size = int(query.get("world_size", [os.environ.get("WORLD_SIZE", "-1")])[0])
            if at != str(port) or size != context.spec.ranks:
                yield from original(url, timeout=timeout, **options)
                return
            calls[context.tests] += 1
            watch(context)
            store = dist.TCPStore(host_of(context.spec), port, size, False, timeout, wait_for_workers=False)
            yield dist.PrefixStore(f"init/{context.tests}/{calls[context.tests]}", store), rank, size

        return handler

    handlers = rendezvous._rendezvous_handlers
    for scheme in ("env", "tcp"):
        handlers[scheme] = ours(handlers[scheme])


def torch_devices(names: Sequence[str]) -> list[torch.device]:
    """torch's own objects for its names of devices."""
    import torch

    return [torch.device(name) for name in names]


def test_store(context: RankContext, use: str) -> Store:
    """A store whose keys are the running test's own, and apart from those of another `use`."""
    import torch.distributed as dist

    assert context.store is not None
    return dist.PrefixStore(f"{use}/{context.tests}", context.store)


def apart(context: RankContext) -> list[str]:
    """The machines that share no file system with the driver's, as the ranks there have found."""
    assert context.store is not None
    ranks = range(context.spec.ranks) if context.spec.addresses else ()
    return sorted({name for rank in ranks if (name := context.store.get(f"shares/{rank}").decode())})


def make_mesh(context: RankContext, shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    """A mesh over the ranks' devices, whose groups the world keeps."""
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


def group_names() -> set[str]:
    """The names of this rank's process groups."""
    return {str(group.group_name) for group in _groups()}


def members() -> dict[str, tuple[int, ...]]:
    """The ranks of each group that this rank belongs to, by the group's name."""
    import torch.distributed as dist

    return {str(group.group_name): tuple(dist.get_process_group_ranks(group)) for group in _groups()}


def flight_record() -> dict[str, object]:
    """What torch's flight recorder has of this rank's collectives, and the `members` of its groups."""
    from torch._C import _distributed_c10d

    # torch has no public name for it: its own analyzer (torch.distributed.flight_recorder) reads the same record.
    record = json.loads(_distributed_c10d._dump_fr_trace_json(True, False))  # type: ignore[attr-defined]
    return {**record, "members": members()}


def collectives() -> dict[str, tuple[tuple[int, ...], int]]:
    """For each group that this rank belongs to: its members' ranks and the number of collectives issued in it.

    Each group numbers its collectives by itself; gloo and nccl do, other backends may not, and are left out.
    """
    import torch.distributed as dist

    numbers: dict[str, tuple[tuple[int, ...], int]] = {}
    for group in _groups():
        try:
            number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        except RuntimeError:
            continue
        numbers[str(group.group_name)] = (tuple(dist.get_process_group_ranks(group)), number)
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
    told = sorted(str(group.group_name) for group in left if not group.group_desc.startswith("mesh_"))
    noun = "process groups" if len(told) > 1 else "the process group"
    lines = (f"left {noun} {', '.join(told)}",) if told else ()
    lasting = sorted(str(group.group_name) for group in left if not _can_be_ended(group))
    return LeftGroups(lines, f"process groups were left: {', '.join(lasting)}" if lasting else None, endable=True)


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
