"""Call of the kernel: the object that the fixture `launch` gives to a test."""

from __future__ import annotations

import pytest

from pytest_accel.features.launch.launch_api import Launch


def pytest_accel_make_launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return the value for the test of `request`; skip it if its parameter names a launcher that is absent."""
    return Launch(request, tmp_path_factory)
