"""A rank's store and default process group, their variables, and the rendezvous of the groups that tests create.

Runs in ranks only, where torch may be imported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from os import close
from socket import socket
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pytest_accel import features
from pytest_accel.compat import torch_api
from pytest_accel.core.launcher_env import OWN_RUN
from pytest_accel.core.log import step
from pytest_accel.core.session_folder import store_folder
from pytest_accel.core.world_key import backend_names
from pytest_accel.messages.world_spec import LOOPBACK, Role, WorldSpec, host_of, loopback_interface
from pytest_accel.rank import group_state, torch_devices
from pytest_accel.rank.signed_store import FolderStore, SignedStore
from pytest_accel.rank.torch_devices import MISSING_TORCH

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_accel.rank.context import RankContext

GROUP_TIMEOUT = timedelta(hours=1)
"""torch's timeout for the process group. Long, because the driver detects hangs and takes the stacks before that."""
_LOOPBACK = ("localhost", LOOPBACK, "::1")
_END_TIMEOUT = timedelta(seconds=4)
"""Time for which rank 0 keeps the store for the other ranks when it exits.

It ends well before the stacks of a retiring world are taken, so that they show the code that keeps rank 0 afterwards.
"""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""The variable that tells torch, as under torchrun, that a store already listens at `MASTER_PORT`."""


class BackendError(Exception):
    """torch, or the backend of the default process group, cannot be used in this rank. The message is one line."""


def prepare(context: RankContext, role: Role) -> None:
    """Open the world's store and, unless the mark says ``init=False``, its default process group.

    Raise :class:`BackendError`, in all ranks, if torch or the backend cannot be used.
    """
    if torch_devices.installed_torch() is None:
        _prepare_without_torch(context, role)
        return
    import torch.distributed as dist

    spec, rank, port = context.spec, context.rank, role.port
    assert port is not None
    host = host_of(spec)
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        dist.set_debug_level_from_env()  # torch read the variable when it was imported, in the fork server.
    device = torch_devices.select(context)
    fake_store: Store | None = None
    if spec.key.fake_size is not None:  # Before the check of the backend, since this registers it.
        fake_store = features.require(context.config, "fake_group").pytest_accel_open_fake_group(context=context)
    backend = None
    if spec.key.init:
        backend = spec.key.backend or context.vendor.backend or torch_api.default_backend(device.type)
        _check_backend(backend, device.type)  # Check before a rank waits for rank 0's store.
    if rank == 0:
        assert role.store is not None
        store: Store = torch_api.serve_store(host, spec.ranks, GROUP_TIMEOUT, socket(fileno=role.store))
    else:
        store = dist.TCPStore(host, port, spec.ranks, False, GROUP_TIMEOUT, wait_for_workers=False)
    context.store = dist.PrefixStore("accel", store)
    context.signed_store = SignedStore(context.store, spec.secret)
    step("has reached the store of its world at port %d", port)
    context.operations.install()
    _use_world_store(context, port)
    if backend is not None:
        group_state.start(context)
        group_store = fake_store or dist.PrefixStore("world", store)
        dist.init_process_group(
            backend, store=group_store, rank=rank, world_size=spec.key.group_size, timeout=GROUP_TIMEOUT
        )
        context.default_group = dist.group.WORLD
        step("has made the process group with %s", backend)


def _use_world_store(context: RankContext, port: int) -> None:
    """Make process groups that tests create at an address (host and port) use the world's store for their rendezvous.

    `TORCHELASTIC_USE_AGENT_STORE` makes every rank a client, so ranks would wait at an address where no store is
    served. Code that sets the variable to another value, for a group with processes that are not ranks of this world,
    gets torch's own store at its address, except at the world's own `port`.
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
            with pytest.MonkeyPatch.context() as patch:
                if named_port != port:
                    patch.delenv(AGENT_STORE, raising=False)
                return original(hostname, named_port, rank, world_size, timeout, *options, **named)
        # If rank 0 served a store at the address, two worlds could not use the address at the same time, and a rank
        # that creates its next group before rank 0 has destroyed the previous group would read the old group's keys.
        # So each group has its own keys in the world's store: by port, size and number of the group at this port.
        group_state.start(context)
        served = dist.TCPStore(host_of(context.spec), port, None, False, timeout, wait_for_workers=False)
        # Some ranks at a loopback address are a group on each machine.
        machine = (
            context.spec.machines[context.rank] if hostname in _LOOPBACK and world_size < context.spec.ranks else ""
        )
        place = f"init/{context.tests}/{machine}/{named_port}/{world_size}"
        turn = served.add(f"{place}/turns/{rank}", 1)
        return dist.PrefixStore(f"{place}/{turn}", served)

    torch_api.replace_store_creation(create)


def _prepare_without_torch(context: RankContext, role: Role) -> None:
    """Open a store for the plugin's own values. The port of the world's store is free then, for the suite's use."""
    spec = context.spec
    if spec.key.init:
        raise BackendError(
            f"@pytest.mark.distributed makes a process group of {MISSING_TORCH}: install torch, or leave the process "
            "group to the test with init=False"
        )
    if spec.addresses:
        raise BackendError(f"a test on several machines needs {MISSING_TORCH}: install torch, or use one machine")
    if role.store is not None:
        close(role.store)
    folder = store_folder(context.session.directory, spec.world)
    context.signed_store = SignedStore(FolderStore(folder), spec.secret)
    step("has reached the store of its world, without torch")


def _check_backend(backend: str, device_type: str) -> None:
    """Raise :class:`BackendError` if torch lacks a backend in `backend`, or ranks on the CPU cannot use it."""
    import torch
    import torch.distributed as dist

    for name in backend_names(backend):
        types = dist.Backend.backend_capability.get(name, ["cpu"])
        if device_type == "cpu" and "cpu" not in types:
            raise BackendError(
                f'backend="{name}" needs {types[0].upper()} devices, but ranks run on the CPU here; drop backend=, '
                f'or add @pytest.mark.devices(kind="{types[0]}")'
            )
        if not dist.is_backend_available(name):
            raise BackendError(
                f"backend {name!r} is not available in torch {torch.__version__}: import the package that registers "
                f"it, or use a torch that is built with it; torch knows {', '.join(dist.Backend.backend_list)}"
            )


def store_of(context: RankContext, name: str) -> Store:
    """Return the part of the world's store for tests that has the keys of this `name`."""
    import torch.distributed as dist

    assert context.store is not None
    context.lends_store = True
    return dist.PrefixStore(name, context.store)


def wait_for_other_ranks(context: RankContext) -> None:
    """Wait in rank 0 until the other ranks have ended their sessions. In the others, announce the end to rank 0.

    The store ends with rank 0, and session fixtures of the other ranks may still use it.
    """
    store = context.store
    assert store is not None
    with contextlib.suppress(RuntimeError):  # Rank 0 has exited, or the wait has timed out.
        if context.rank:
            store.set(f"ended/{context.rank}", "")
        elif context.spec.ranks > 1:  # With a timeout, since a rank may hang.
            store.wait([f"ended/{rank}" for rank in range(1, context.spec.ranks)], _END_TIMEOUT)


def make_mesh(context: RankContext, shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    """Return a device mesh over the ranks' devices. Its groups last as long as the world."""
    __tracebackhide__ = True
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(torch.device(context.torch_device).type, shape, mesh_dim_names=names)


def environment(spec: WorldSpec, rank: int, port: int) -> dict[str, str | None]:
    """Return the variables of `identity`, and the variables that only the process group needs."""
    return {
        **identity(spec, rank, port),
        **{name: os.environ.get(name, value) for name, value in group_state.VARIABLES.items()},
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


class Gathering:
    """This rank's side of an exchange. All ranks make the same calls in a test; the next test starts anew."""

    def __init__(self, context: RankContext, name: str) -> None:
        """`name` distinguishes the exchange from others, also in reports of ranks that wait in it."""
        self._context, self._name = context, name
        self._last: list[str] = []
        """The keys of this rank's value of the last call."""
        self._earlier: list[str] = []
        """The keys of its values of earlier calls that have not been removed."""

    @property
    def _store(self) -> SignedStore:
        assert self._context.signed_store is not None  # Made before the first test.
        return self._context.signed_store

    def put(self, value: bytes) -> list[str]:
        """Set this rank's value of the next call, without waiting; return the names of the values of all ranks."""
        context, calls = self._context, self._context.exchanges
        calls[self._name] += 1
        self._earlier += self._last
        names = [f"{self._name}/{context.tests}/{calls[self._name]}/{rank}" for rank in range(context.spec.ranks)]
        self._last = self._store.set(names[context.rank], value)
        return names

    def __call__(self, value: bytes) -> list[bytes]:
        """Return the values of all ranks, ordered by rank."""
        __tracebackhide__ = True
        names, values = self.put(value), []
        self._context.awaited_exchange = self._name
        try:
            for name in names:  # A comprehension would be a frame of the traceback.
                values.append(self._store.get(name))
        finally:
            self._context.awaited_exchange = None
        # All ranks have reached this call, so all have read the values of the calls before it.
        self._store.delete(self._earlier)
        return values
