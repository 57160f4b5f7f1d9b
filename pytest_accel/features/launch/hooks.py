"""Call of the kernel: the object that the fixture `launch` gives to a test."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pytest_accel.core.stash_keys import LAUNCHED_RANKS
from pytest_accel.features.launch.launch_api import Launch, LeasedDevices, missing
from pytest_accel.features.launch.launch_commands import LAUNCHERS
from pytest_accel.rank.context import RANK, RankContext
from pytest_accel.rank.device_memory import empty_cache
from pytest_accel.settings import options


def pytest_accel_make_launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return a `Launch` for the test of `request`; skip the test if its parameter names a launcher that is absent."""
    context = request.config.stash.get(RANK, None)
    leased = LeasedDevices()
    free_devices: Callable[[], None] = _no_devices
    if context is not None:
        if context.spec.grouped and context.spec.ranks > 1:
            pytest.fail(
                f"the fixture 'launch' starts ranks itself, and @pytest.mark.distributed({context.spec.ranks}) would "
                f"have {context.spec.ranks} copies of the script launched: use @pytest.mark.devices(n) instead, and "
                "n ranks are launched",
                pytrace=False,
            )
        leased = LeasedDevices(
            context.spec.key.kind if context.own_devices else "cpu",
            context.vendor.hardware and bool(context.own_devices),
            context.own_devices,
            context.vendor.mask_variables,
            _own_variables(context),
        )
        free_devices = partial(empty_cache, context)

    def skip(reason: str) -> None:
        __tracebackhide__ = True
        if options.settings(request.config).strict:
            pytest.fail(f"{reason} (--accel-strict)", pytrace=False)
        pytest.skip(reason)

    # Skip a test that is parametrized with launchers before its body runs.
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    named = parameters.get("launcher")
    if isinstance(named, str) and named in LAUNCHERS and (reason := missing(named)) is not None:
        skip(reason)

    def record_ranks(count: int) -> None:
        request.node.user_properties.append((LAUNCHED_RANKS, count))

    def make_folder() -> Path:
        return tmp_path_factory.mktemp("launch")

    return Launch(leased, make_folder, request.path.parent, skip, free_devices, record_ranks)


def _no_devices() -> None:
    """Free no memory: the test's process has no devices of its own."""


def _own_variables(context: RankContext) -> dict[str, str | None]:
    """Return the environment variables that the plugin has set for the rank, without those of the mark's ``env``."""
    decoded = {
        os.fsdecode(name): None if value is None else os.fsdecode(value) for name, value in context.variables.items()
    }
    return {name: value for name, value in decoded.items() if name not in dict(context.spec.key.env)}
