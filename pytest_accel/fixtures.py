"""Fixtures of the plugin. Most have a value only in a rank; elsewhere they fail the test and name the missing mark.

PYTEST_DONT_REWRITE (as `pytest_accel`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import pytest

from pytest_accel import features

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_accel.core.device import Device
    from pytest_accel.features.faults.announcements import Faults
    from pytest_accel.features.launch.hooks import Launch
    from pytest_accel.rank.context import RankContext


_T = TypeVar("_T")


@dataclass(frozen=True)
class Accel:
    """The part of the test's lease that belongs to this rank; the value of the fixture `accel`."""

    kind: str
    devices: tuple[Device, ...]
    """This rank's own devices."""
    ids: tuple[str, ...]
    """Stable ids of `devices`."""
    mask: Mapping[str, str]
    """The environment variables that select the devices which this process sees."""


class Gather(Protocol):
    """The type of the fixture `gather`."""

    def __call__(self, obj: _T, /) -> list[_T]:
        """Return a list of the objects of all ranks, ordered by rank."""


class MakeMesh(Protocol):
    """The type of the fixture `device_mesh`."""

    def __call__(self, shape: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
        """Return a mesh with this `shape` over all ranks; `names` are the names of its dimensions."""


def _rank_context(request: pytest.FixtureRequest) -> RankContext:
    """Return the context of this rank. Fail the test if it lacks the marks that the requested fixture needs."""
    from pytest_accel.core.missing_mark import missing_mark
    from pytest_accel.rank.context import RANK

    context = request.config.stash.get(RANK, None)
    error = missing_mark(str(request.fixturename), None if context is None else context.spec.key)
    if error is not None:
        raise error
    assert context is not None
    return context


def _torch_context(request: pytest.FixtureRequest) -> RankContext:
    """Return the context of this rank as :func:`_rank_context` does. Fail the test if torch is not installed."""
    from pytest_accel.rank.torch_devices import MISSING_TORCH, installed_torch

    context = _rank_context(request)
    if installed_torch() is None:
        pytest.fail(f"the fixture {request.fixturename!r} needs {MISSING_TORCH}", pytrace=False)
    return context


@pytest.fixture(scope="session")
def accel(request: pytest.FixtureRequest) -> Accel:
    """Return this rank's lease: its devices, their kind and ids, and the mask of this process."""
    import os

    context = _rank_context(request)
    names = context.vendor.mask_variables
    mask = {name: os.environ[name] for name in names if name in os.environ}
    return Accel(context.spec.key.kind, context.own_devices, tuple(device.id for device in context.own_devices), mask)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return this rank's device, the first if it has several; ``cpu`` for a rank without accelerators."""
    from pytest_accel.rank.torch_devices import torch_devices

    return torch_devices([_torch_context(request).torch_device])[0]


@pytest.fixture(scope="session")
def devices(request: pytest.FixtureRequest) -> list[torch.device]:
    """Return all devices that this process sees, in the session's order."""
    from pytest_accel.rank.torch_devices import torch_devices

    return torch_devices(_torch_context(request).torch_devices())


@pytest.fixture(scope="session")
def rank(request: pytest.FixtureRequest) -> int:
    """Return the rank of this process in the world."""
    return _rank_context(request).rank


@pytest.fixture(scope="session")
def local_rank(request: pytest.FixtureRequest) -> int:
    """Return the rank of this process among the ranks on its machine."""
    context = _rank_context(request)
    return context.spec.neighbours(context.rank).index(context.rank)


@pytest.fixture(scope="session")
def node_rank(request: pytest.FixtureRequest) -> int:
    """Return the number of this process's machine among the machines of the world."""
    context = _rank_context(request)
    return context.spec.machine_rank(context.rank)


@pytest.fixture(scope="session")
def world_size(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks."""
    return _rank_context(request).spec.key.group_size


@pytest.fixture(scope="session")
def process_group(request: pytest.FixtureRequest) -> ProcessGroup:
    """Return the world's default process group."""
    group = _rank_context(request).default_group
    assert group is not None
    return group


@pytest.fixture(scope="session")
def device_mesh(request: pytest.FixtureRequest) -> MakeMesh:
    """``device_mesh(shape, names)``: return a mesh over all ranks. Meshes are cached by shape and names."""
    from pytest_accel.rank import process_group as group

    context = _rank_context(request)
    meshes: dict[tuple[tuple[int, ...], tuple[str, ...] | None], DeviceMesh] = {}

    def make(shape: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
        __tracebackhide__ = True
        key = (tuple(shape), None if names is None else tuple(names))
        if key not in meshes:
            meshes[key] = group.make_mesh(context, *key)
        return meshes[key]

    return make


@pytest.fixture
def dist_store(request: pytest.FixtureRequest) -> Store:
    """Return a store that the ranks of this test share; it is empty at the start of each test."""
    from pytest_accel.rank.process_group import store_of

    context = _torch_context(request)
    return store_of(context, f"test/{context.tests}")


@pytest.fixture(scope="session")
def world_store(request: pytest.FixtureRequest) -> Store:
    """Return a store that the ranks share as long as their world lives; its keys are kept from test to test."""
    from pytest_accel.rank.process_group import store_of

    return store_of(_torch_context(request), "world")


@pytest.fixture(scope="session")
def gather(request: pytest.FixtureRequest) -> Gather:
    """``gather(obj)``: return the objects of all ranks, ordered by rank. All ranks must call it; `obj` must pickle.

    Uses the world's store, not the process group: it works with ``init=False`` and does not count as a collective.
    """
    import pickle  # Imported here because most sessions do not use it.

    from pytest_accel.rank.process_group import Gathering

    exchange = Gathering(_rank_context(request), "gather")

    def call(obj: _T, /) -> list[_T]:
        __tracebackhide__ = True
        try:
            data = pickle.dumps(obj)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            name = getattr(obj, "__name__", None) or type(obj).__name__
            raise TypeError(f"gather() needs picklable objects: {name} ({error})") from None
        return [pickle.loads(part) for part in exchange(data)]

    return call


@pytest.fixture(scope="session")
def free_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Return a port on rank 0's machine, the same on every rank, reserved as long as the world lives."""
    from pytest_accel.core.interpreter import hold_port

    context = _rank_context(request)
    store = context.signed_store
    assert store is not None
    if context.rank == 0:
        with hold_port() as held:
            number = int(held.getsockname()[1])
            store.set("port", b"%d" % number)
            yield number
    else:
        yield int(store.get("port"))


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """Return a folder that all ranks of the test share (`tmp_path` differs between ranks)."""
    from socket import gethostname

    context = _rank_context(request)
    if not context.session.shared:
        pytest.fail(
            "the fixture 'shared_tmp_path' needs a folder that all nodes of the test share, and the session's "
            f"temporary folder is not there on {gethostname()}: give pytest a --basetemp in a folder that all nodes "
            "share",
            pytrace=False,
        )
    path = context.shared_directory
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@pytest.fixture
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """``launch(script, *args, launcher="torchrun", ...)``: run a script on the test's devices; see `Launch`."""
    made: Launch = features.require(request.config, "launch").pytest_accel_make_launch(
        request=request, tmp_path_factory=tmp_path_factory
    )
    return made


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Iterator[Faults]:
    """Return an object that announces how ranks of this test end on purpose, and plans faults; see `Faults`."""
    context = _rank_context(request)
    with features.require(request.config, "faults").pytest_accel_make_faults(context=context) as made:
        yield made


FIXTURES = frozenset(name for name, value in globals().items() if isinstance(value, type(accel)))
"""The names of the plugin's fixtures."""
