"""Tests of the kind `privateuse1`, with a backend in pure Python that torch loads by its entry point."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pytest_accel.core.device import Device, MaskError
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.queries import ask_torch
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.hardware.vendors.privateuse1 import PrivateUse1
from tests.installed_packages import InstalledPackages
from tests.torch_release import needs_torch

DEVICES = tuple(
    Device(kind="privateuse1", id=f"fakeacc-{n}", index=n, name=f"Fake {n}", single_process=True) for n in range(3)
)
BACKEND = """
import types
import torch

def load():
    print("fakeacc says hello")
    module = types.ModuleType("torch.fakeacc")
    module.is_available = lambda: True
    module.is_initialized = lambda: False
    module.device_count = lambda: 3
    module.current_device = lambda: 0
    module.get_device_name = lambda index: f"Fake {index}"
    torch.utils.rename_privateuse1_backend("fakeacc")
    torch._register_device_module("fakeacc", module)
"""


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Install a package with a torch backend for this process and for those that it starts."""
    packages = InstalledPackages(folder, monkeypatch)
    packages.install("fakeacc-plugin", "torch.backends", "fakeacc = fakeacc_plugin:load", "fakeacc_plugin", code)
    monkeypatch.syspath_prepend(folder)


@needs_torch(2, 6)
def test_devices_are_found_by_asking_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, BACKEND)
    vendor = make_vendor("privateuse1")
    assert vendor.lacking() is None
    assert vendor.discover() == DEVICES
    assert vendor.notes == ()


@pytest.mark.parametrize(
    ("code", "note"),
    [
        (
            "def load():\n    raise OSError('no driver')\n",
            "the devices of torch's backends (fakeacc) are unknown: RuntimeError: Failed to load the backend",
        ),
        (
            BACKEND.replace("fakeacc", "npu"),
            "torch, with the backends (fakeacc), has npu, which has a kind of its own",
        ),
    ],
    ids=["fails", "npu"],
)
@needs_torch(2, 6)
def test_a_backend_without_devices_of_this_kind_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, note: str
) -> None:
    _install(tmp_path, monkeypatch, code)
    vendor = make_vendor("privateuse1")
    assert vendor.discover() == ()
    assert [text[: len(note)] for text in vendor.notes] == [note]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import time; time.sleep(60)", "no answer within 0.2 seconds"),
        ("print('hello')", "its output cannot be read"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="replaces the interpreter by a shell script")
def test_an_error_says_why_torch_gave_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(OSError, match=f"^{message}$"):
        ask_torch("", os.environ, timeout=0.2 if "sleep" in code else 60)


def test_verification_compares_backend_and_index() -> None:
    vendor = PrivateUse1(KINDS["privateuse1"])
    vendor.compare(DEVICES[1:2], ["fakeacc:0", "fakeacc:1"], {})
    with pytest.raises(MaskError, match=r"\(fakeacc-2\) but sees 2 \(fakeacc:0, fakeacc:1\); environment: no mask"):
        vendor.compare(DEVICES[2:], ["fakeacc:0", "fakeacc:1"], {})
    with pytest.raises(MaskError, match=r"but sees 1 \(other:0\)"):
        vendor.compare(DEVICES[:1], ["other:0"], {})
