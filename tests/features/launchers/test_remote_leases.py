"""Tests of both sides of leases on another node's devices, each without the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.launchers import lease_agent, remote_leases
from pytest_accel.features.launchers.lease_agent import LeaseAgent
from pytest_accel.features.launchers.lease_messages import (
    InventoryReply,
    InventoryRequest,
    LeaseGranted,
    LeaseLost,
    LeaseWanted,
    RequestLease,
    UseSettings,
)
from pytest_accel.features.launchers.remote_leases import RemoteLeases
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.leases.demand import MachineDemand, RemoteDevicesError, WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings

SETTINGS = Settings(accel="sim:2")


def demand(number: int, mask: str | None = None) -> MachineDemand:
    """Return a demand for one device."""
    need = DeviceNeed(1, "sim")
    key = WorldKey("sim", need, 1, grouped=False, devices_per_rank=1)
    return MachineDemand(number, WorldDemand(key, Holder.here("a test")), need, mask)


def test_notices_and_the_grant_of_a_lease_have_the_number_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Allocator:
        """An allocator whose broker notifies the holder, in another thread, before it answers."""

        def __init__(
            self,
            machine: object,
            slots: int,
            on_wanted: Callable[[int], None],
            on_lost: Callable[[int, str], None],
            *,
            waits_for_busy: bool,
        ) -> None:
            self.on_wanted, self.on_lost = on_wanted, on_lost

        def submit(self, demand: MachineDemand, answer: Callable[[tuple[Device, ...]], None]) -> None:
            self.on_wanted(demand.number)
            self.on_lost(demand.number, "somebody took it")
            answer(())

    monkeypatch.setattr(lease_agent, "Allocator", Allocator)
    sent: list[Any] = []
    agent = LeaseAgent(sent.append, machine_for)
    agent.handle(UseSettings(SETTINGS))
    agent.handle(RequestLease(demand(3)))
    assert [type(message) for message in sent] == [LeaseWanted, LeaseLost, LeaseGranted]
    assert {message.number for message in sent} == {3}
    assert sent[1].why == "somebody took it"


def test_an_agent_that_does_not_tell_its_devices_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_leases, "_INVENTORY_TIMEOUT", 0.05)
    sent: list[object] = []
    leases = RemoteLeases("there", sent.append)
    why = "the sim devices of there cannot be looked up: its agent did not answer within 0.05 s"
    for _ in range(2):
        with pytest.raises(RemoteDevicesError, match=why):
            leases.inventory("sim", SETTINGS)
    assert sent == [InventoryRequest("sim", SETTINGS)]

    # A late answer is not taken for that about another kind.
    leases.handle(InventoryReply("sim", Inventory("sim")))
    with pytest.raises(RemoteDevicesError, match="the cpu devices of there cannot be looked up"):
        leases.inventory("cpu", SETTINGS)
    assert leases.inventory("sim", SETTINGS) == Inventory("sim")


def test_the_mask_of_a_cluster_is_read_in_the_order_that_the_node_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_for(SETTINGS)
    vendor = machine.vendor("sim")
    visible = vendor.visible

    def in_order(devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        return visible(devices[::-1] if environ.get("SIM_DEVICE_ORDER") == "reversed" else devices, environ)

    monkeypatch.setattr(vendor, "visible", in_order)
    monkeypatch.setenv("SIM_DEVICE_ORDER", "reversed")
    monkeypatch.setenv("SIM_VISIBLE_DEVICES", "1")
    sent: list[Any] = []
    agent = LeaseAgent(sent.append, lambda settings: machine)
    agent.handle(UseSettings(SETTINGS))
    agent.handle(RequestLease(demand(1, mask="0")))
    agent.close()
    (lease,) = sent
    assert [device.id for device in lease.devices] == ["sim-1"]
