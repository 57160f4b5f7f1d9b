"""Tests of what replaces torch's young names in an older torch."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest

from pytest_accel.compat import torch_api
from tests.torch_release import needs_torch


def test_the_default_backend_of_a_type_of_devices() -> None:
    pytest.importorskip("torch.distributed")
    assert (torch_api.default_backend("cpu"), torch_api.default_backend("cuda")) == ("gloo", "nccl")
    with pytest.raises(ValueError, match="Default backend not registered for device : meta"):
        torch_api.default_backend("meta")


def test_the_accelerator_in_a_torch_that_cannot_list_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delattr(torch, "accelerator", raising=False)
    assert torch_api.accelerator_type(torch) == "cuda"
    with pytest.raises(RuntimeError, match=r"cannot list them: torch\.accelerator is new in torch 2\.6"):
        torch_api.accelerator()


def test_no_accelerator_in_a_torch_that_raises_an_error_then() -> None:
    def current_accelerator() -> object:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    torch = SimpleNamespace(accelerator=SimpleNamespace(current_accelerator=current_accelerator))
    assert torch_api.accelerator_type(torch) is None


def test_the_default_device_in_a_torch_that_forgets_its_initial_state() -> None:
    def get_default_device() -> object:
        raise AttributeError("'NoneType' object has no attribute 'device'")

    torch = SimpleNamespace(get_default_device=get_default_device, device=lambda name: f"device {name}")
    assert torch_api.default_device(torch) == "device cpu"


@pytest.mark.parametrize(
    ("version", "has_limit"),
    [("2.5.1", False), ("2.6.0", False), pytest.param("2.8.0", True, marks=needs_torch(2, 8))],
)
def test_the_store_of_an_older_torch_serves_at_a_socket_and_takes_any_size(
    monkeypatch: pytest.MonkeyPatch, version: str, has_limit: bool
) -> None:
    torch, dist = pytest.importorskip("torch"), pytest.importorskip("torch.distributed")
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    listening = socket.create_server(("127.0.0.1", 0))
    port, timeout = listening.getsockname()[1], timedelta(seconds=60)
    served = torch_api.serve_store("127.0.0.1", 2, timeout, listening)
    assert listening.fileno() == -1
    assert torch_api.serves_with_libuv() is has_limit
    client = dist.TCPStore("127.0.0.1", port, 2, False, timeout, wait_for_workers=False)
    value = b"x" * ((8 if has_limit else 9) << 20)
    client.set("large", value)
    assert served.get("large") == value
