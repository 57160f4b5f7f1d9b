"""What tests ask for. In a rank they get it; anywhere else they are told which mark is missing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import pytest

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_accel.core.device import Device
    from pytest_accel.launch.launch_api import Launch
    from pytest_accel.rank.context import RankContext


_T = TypeVar("_T")


@dataclass(frozen=True)
class Accel:
    """The test's lease, as this rank has it."""

    kind: str
    devices: tuple[Device, ...]
    """This rank's own devices."""
    ids: tuple[str, ...]
    """Their stable ids."""
    mask: Mapping[str, str]
    """The variables that make this process see its devices."""


class Gather(Protocol):
    """The type of the fixture `gather`."""

    def __call__(self, obj: _T, /) -> list[_T]:
        """Return every rank's object, in the order of ranks."""


class MakeMesh(Protocol):
    """The type of the fixture `device_mesh`."""

    def __call__(self, shape: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
        """Return a mesh of this `shape` over all ranks, with the `names` of its dimensions."""


def _in_rank(request: pytest.FixtureRequest, *, grouped: bool = False) -> RankContext:
    from pytest_accel.rank.context import RANK

    context = request.config.stash.get(RANK, None)
    if context is None:
        mark = "@pytest.mark.distributed" if grouped else "@pytest.mark.devices or @pytest.mark.distributed"
        pytest.fail(f"the fixture {request.fixturename!r} needs {mark} on the test", pytrace=False)
    if grouped and not context.spec.grouped:
        pytest.fail(
            f"the fixture {request.fixturename!r} needs @pytest.mark.distributed on the test; "
            "@pytest.mark.devices alone makes no ranks",
            pytrace=False,
        )
    return context


@pytest.fixture
def accel_world_size(request: pytest.FixtureRequest) -> int:
    """Carries the parameter of a test with a list of world sizes; tests ask for `world_size`."""
    return int(request.param)


@pytest.fixture(scope="session")
def accel(request: pytest.FixtureRequest) -> Accel:
    """The lease: devices, their kind and ids, and the mask of this process."""
    import os

    context = _in_rank(request)
    names = context.vendor.mask_variables
    mask = {name: os.environ[name] for name in names if name in os.environ}
    return Accel(context.spec.kind, context.own, tuple(device.id for device in context.own), mask)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """This rank's device, the first of them if it has several; ``cpu`` for ranks without accelerators."""
    from pytest_accel.rank import process_group as group

    return group.torch_devices([_in_rank(request).torch_device])[0]


@pytest.fixture(scope="session")
def devices(request: pytest.FixtureRequest) -> list[torch.device]:
    """All devices that this process sees, in the session's order."""
    from pytest_accel.rank import process_group as group

    return group.torch_devices(_in_rank(request).torch_devices())


@pytest.fixture(scope="session")
def rank(request: pytest.FixtureRequest) -> int:
    """This process's number in the world."""
    return _in_rank(request, grouped=True).rank


@pytest.fixture(scope="session")
def local_rank(request: pytest.FixtureRequest) -> int:
    """This process's number on its machine."""
    context = _in_rank(request, grouped=True)
    return context.spec.neighbours(context.rank).index(context.rank)


@pytest.fixture(scope="session")
def node_rank(request: pytest.FixtureRequest) -> int:
    """The number of this process's machine among those of the world."""
    context = _in_rank(request, grouped=True)
    return context.spec.node_rank(context.rank)


@pytest.fixture(scope="session")
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks."""
    return _in_rank(request, grouped=True).spec.ranks


def _group(request: pytest.FixtureRequest) -> ProcessGroup:
    made = _in_rank(request, grouped=True).default_group
    if made is None:
        pytest.fail(
            f"the fixture {request.fixturename!r} needs a process group, which @pytest.mark.distributed(init=False) "
            "leaves to the test",
            pytrace=False,
        )
    return made


@pytest.fixture(scope="session")
def process_group(request: pytest.FixtureRequest) -> ProcessGroup:
    """The world's default process group."""
    return _group(request)


@pytest.fixture(scope="session")
def device_mesh(request: pytest.FixtureRequest) -> MakeMesh:
    """``device_mesh(shape, names)``: a mesh over all ranks; one of a shape is made once and kept."""
    from pytest_accel.rank import process_group as group

    context = _in_rank(request, grouped=True)
    _group(request)
    made: dict[tuple[tuple[int, ...], tuple[str, ...] | None], DeviceMesh] = {}

    def make(shape: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
        __tracebackhide__ = True
        key = (tuple(shape), None if names is None else tuple(names))
        if key not in made:
            made[key] = group.make_mesh(context, *key)
        return made[key]

    return make


@pytest.fixture
def dist_store(request: pytest.FixtureRequest) -> Store:
    """A store that the ranks of this test share; it starts empty for each test."""
    from pytest_accel.rank import process_group as group

    return group.test_store(_in_rank(request, grouped=True))


@pytest.fixture(scope="session")
def world_store(request: pytest.FixtureRequest) -> Store:
    """A store that the ranks share as long as their world lives; what a test has set there, the next one finds."""
    from pytest_accel.rank import process_group as group

    return group.world_store(_in_rank(request, grouped=True))


@pytest.fixture(scope="session")
def gather(request: pytest.FixtureRequest) -> Gather:
    """``gather(obj)``: every rank's object, in the order of ranks. All ranks must call it; `obj` must pickle.

    Goes over the world's store and not the process group, so it works with ``init=False`` and counts as no collective.
    """
    context = _in_rank(request, grouped=True)
    store = context.signed_store
    assert store is not None
    # Calls are counted in each test: ranks that have failed may have made fewer, and agree again in the next test.
    test = calls = 0
    previous: str | None = None

    def call(obj: _T, /) -> list[_T]:
        __tracebackhide__ = True
        nonlocal test, calls, previous
        if context.tests != test:
            test, calls = context.tests, 0
        calls += 1
        own = f"gather/{test}/{calls}/{context.rank}"
        data = pickle.dumps(obj)
        store.set(own, data)
        parts: list[bytes] = []
        for rank in range(context.spec.ranks):
            parts.append(data if rank == context.rank else store.get(f"gather/{test}/{calls}/{rank}"))
        # All have called once more, so all have read what was set in the call before.
        if previous is not None:
            store.delete(previous)
        previous = own
        return [pickle.loads(part) for part in parts]

    return call


@pytest.fixture(scope="session")
def free_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port of rank 0's machine, the same on every rank, that nothing else is given as long as the world lives."""
    from pytest_accel.launch.reserved_port import hold

    context = _in_rank(request, grouped=True)
    store = context.signed_store
    assert store is not None
    if context.rank == 0:
        with hold() as held:
            number = int(held.getsockname()[1])
            store.set("port", b"%d" % number)
            yield number
    else:
        yield int(store.get("port"))


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """A folder that is the same on every rank of the test; `tmp_path` is each rank's own."""
    from pytest_accel.rank import process_group as group

    context = _in_rank(request, grouped=True)
    if apart := group.apart(context):
        pytest.fail(
            "the fixture 'shared_tmp_path' needs a folder that all nodes of the test share, and the session's "
            f"temporary folder is not there on {' and '.join(apart)}: give pytest a --basetemp in a folder that all "
            "nodes share",
            pytrace=False,
        )
    path = context.shared_directory
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@pytest.fixture
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """``launch(script, *args, launcher="torchrun", ...)``: run a script on the test's devices; see `Launch`."""
    from pytest_accel.launch import fixture

    return fixture.make(request, tmp_path_factory)
