"""Tests of ``--accel``, of the inventory of a session, and of the header that describes the inventory."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_accel.core import kinds as core_kinds
from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KindFacts, kinds
from pytest_accel.hardware import inventory
from pytest_accel.hardware.health import Health
from pytest_accel.hardware.inventory import Inventory, Machine, describe, parse_kind
from pytest_accel.hardware.registry import VendorError
from pytest_accel.hardware.vendors.base_vendor import BaseVendor


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("auto", ("auto", None)),
        (" cuda ", ("cuda", None)),
        ("cpu:4", ("cpu", "4")),
        ("sim:a/b.toml", ("sim", "a/b.toml")),
    ],
)
def test_a_kind_may_have_an_argument_after_a_colon(text: str, parts: tuple[str, str | None]) -> None:
    assert parse_kind(text) == parts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, f"--accel {text!r}: allowed are auto, none, {', '.join(kinds())}")
            for text in ("", "gpu", "CUDA", "gpu:0", ":3")
        ),
        ("auto:1", "--accel 'auto:1': auto takes nothing after a colon"),
        ("sim", "--accel 'sim': say how many devices: sim:8, or sim:FILE.toml"),
        ("none:", "--accel 'none:': none takes nothing after a colon"),
        ("rocm:", "--accel rocm:: rocm takes nothing after a colon"),
        *((f"cpu:{n}", f"--accel cpu:{n}: allowed are cpu and cpu:N, with N from 1") for n in ("", "0", "x", "-1")),
        *(
            (
                f"sim:{n}",
                f"--accel sim:{n}: allowed are sim:N, with N from 1, and sim:FILE.toml; either may end in ,shared",
            )
            for n in ("", "0", "a.yaml", ",shared")
        ),
    ],
)
def test_a_wrong_kind_or_argument_of_a_kind_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _ = Machine(text, environ={}).session


def _machine(text: str, only: str | None = None, order: str = "", **environ: str) -> Machine:
    """Return a machine; `environ` has the values of masks by the kind in upper case."""
    masks = {f"{kind}_VISIBLE_DEVICES": mask for kind, mask in environ.items()}
    return Machine(text, only, order, masks)


def _ids(inventory: Inventory) -> list[str]:
    return [device.id for device in inventory.devices]


SIM = "SIM_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("machine", "ids", "header"),
    [
        (_machine("sim:3"), "012", "sim, 3 devices: 3 x sim"),
        # An inherited mask of the kind selects and orders the devices.
        (_machine("sim:4", SIM="2,0", CUDA="1"), "20", f"sim, 2 devices: 2 x sim, {SIM}=2,0 leaves 2 of 4"),
        (
            _machine("sim:2", SIM=""),
            "",
            f"sim, no devices, {SIM}= leaves none of 2 (asked for by name: ranks do not run on the CPU)",
        ),
        # The options select and sort what the mask leaves; their indices count this.
        (
            _machine("sim:4", "1,sim-3", SIM="3,2,1"),
            "23",
            f"sim, 2 devices: 2 x sim, {SIM}=3,2,1 leaves 3 of 4; --accel-ids 1,sim-3 leaves 2 of 3",
        ),
        (
            _machine("sim:4", "3,1,0", "pci", SIM="3,2,1,0"),
            "023",
            f"sim, 3 devices: 3 x sim, order pci, {SIM}=3,2,1,0 leaves 4 of 4; --accel-ids 3,1,0 leaves 3 of 4",
        ),
        (_machine("sim:3", order="2"), "201", "sim, 3 devices: 3 x sim, order 2"),
        (
            _machine("sim:4", "2,1,0", "1", SIM="3,2,1"),
            "231",
            f"sim, 3 devices: 3 x sim, order 1, {SIM}=3,2,1 leaves 3 of 4; --accel-ids 2,1,0 leaves 3 of 3",
        ),
        (
            _machine("sim:4", "2,3", "3,2"),
            "32",
            "sim, 2 devices: 2 x sim, order 3,2; --accel-ids 2,3 leaves 2 of 4",
        ),
        (_machine("none", "0", "fastest"), "", "--accel none: accelerators are left alone (ranks run on the CPU)"),
    ],
)
def test_masks_and_options_select_the_devices_of_a_session(machine: Machine, ids: str, header: str) -> None:
    assert _ids(machine.session) == [f"sim-{number}" for number in ids]
    assert describe(machine.session) == f"accel: {header}"
    assert machine.session is machine.session


def test_a_device_that_the_mask_hides_cannot_be_named() -> None:
    machine = _machine("sim:2", "sim-1", SIM="sim-0")
    with pytest.raises(ValueError, match=r"^--accel-ids: 'sim-1' names no device; allowed are 0 \(sim-0\)$"):
        _ = machine.session
    with pytest.raises(ValueError, match=r"^--accel-order: '2' names no device; allowed are 0 \(sim-0\), 1"):
        _ = _machine("sim:2", order="2").session


A100 = [Device("cuda", f"GPU-{n}", n, "NVIDIA A100", memory=80 * 1024**3) for n in range(2)]
T4 = Device("cuda", "GPU-2", 2, "NVIDIA T4", memory=15 * 1024**3)
SLOTS = tuple(Device("cpu", f"cpu-{n}", n, "CPU", cores=cores) for n, cores in enumerate([(0, 1), (2, 3), (4,)]))


@pytest.mark.parametrize(
    ("inventory", "header"),
    [
        (Inventory("none"), "no accelerator found (ranks run on the CPU)"),
        (
            Inventory(
                "cuda", (A100[0], T4, A100[1]), "fastest", {"CUDA_VISIBLE_DEVICES": "0,2,3"}, 4, 3, ("GPU 4: x",)
            ),
            "cuda, 3 devices: 2 x NVIDIA A100 (80 GiB), NVIDIA T4 (15 GiB), order fastest, "
            "CUDA_VISIBLE_DEVICES=0,2,3 leaves 3 of 4; GPU 4: x",
        ),
        (Inventory("cpu", SLOTS), "cpu, 3 devices: 2 x CPU (2 cores), CPU (1 core)"),
    ],
)
def test_the_header_groups_equal_devices(inventory: Inventory, header: str) -> None:
    assert describe(inventory) == f"accel: {header}"


def test_another_kind_ignores_the_device_names_of_the_session() -> None:
    machine = _machine("sim:2", "1", "1")
    assert machine.of("sim") is machine.session
    slots = machine.of("cpu")
    assert slots is machine.of("cpu")
    assert slots.kind == "cpu"
    assert len(slots.devices) == slots.present >= 1
    assert slots.notes == ()
    # Without --accel sim:N there are none.
    assert _machine("cpu:2").of("sim").devices == ()


TOY = KindFacts("toy")


class Toy(BaseVendor):
    """A vendor of another package, with one device."""

    def discover(self) -> tuple[Device, ...]:
        return (Device("toy", "toy-0", 0, "Toy"),)

    def health(self, devices: Sequence[Device], session: int | None = None) -> Mapping[str, Health]:
        return {device.id: Health() for device in devices}


def _fail(*args: object) -> Any:
    raise OSError("asleep")


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object], None]]:
    """Yield a function that publishes a callable as the kind ``toy``, the only one that ``auto`` then tries."""

    def publish(make: object) -> None:
        monkeypatch.setitem(sys.modules, "toys", SimpleNamespace(make=make))
        monkeypatch.setattr(core_kinds, "entry_points", lambda group: [EntryPoint("toy", "toys:make", group)])
        monkeypatch.setattr(inventory, "kinds", lambda: ("toy",))
        core_kinds.published.cache_clear()

    yield publish
    core_kinds.published.cache_clear()


@pytest.mark.parametrize("method", ["lacking", "discover", "visible", "health", None])
def test_auto_ignores_a_kind_whose_vendor_fails(publish: Callable[[object], None], method: str | None) -> None:
    failing = type("Toy", (Toy,), {} if method is None else {method: _fail})
    publish(lambda argument: failing(TOY))
    found = Machine("auto", environ={}, skip_busy=True).session
    if method is None:
        assert _ids(found) == ["toy-0"]
    else:
        assert found.devices == ()
        assert found.notes == ("kind 'toy' of toys:make: its devices cannot be looked up: OSError: asleep",)


def test_auto_names_the_devices_that_torch_cannot_use_and_does_not_read_their_masks(
    publish: Callable[[object], None],
) -> None:
    unusable = {"lacking": lambda self: "torch_toy is not installed", "visible": _fail}
    publish(lambda argument: type("Toy", (Toy,), unusable)(TOY))
    assert Machine("auto", environ={}).session.notes == ("Toy ignored, since torch_toy is not installed",)
    # Nothing is said of a kind without devices.
    publish(lambda argument: type("Toy", (Toy,), {**unusable, "discover": lambda self: ()})(TOY))
    assert Machine("auto", environ={}).session.notes == ()


def test_a_kind_that_needs_an_argument_is_used_only_with_one(publish: Callable[[object], None]) -> None:
    def make(argument: str | None) -> Toy:
        if argument is None:
            raise ValueError("allowed is toy:N")
        return Toy(TOY)

    publish(make)
    why = "kind 'toy' of toys:make: allowed is toy:N"
    assert Machine("auto", environ={}).session.notes == (why,)
    for text in ("none", "toy"):
        with pytest.raises(VendorError, match=f"^{why}$"):
            Machine(text, environ={}).of("toy")
    assert _ids(Machine("toy:1", environ={}).session) == ["toy-0"]
