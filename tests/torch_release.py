"""The installed release of torch, without importing it, and the mark of tests that need a newer one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def _release() -> tuple[int, int]:
    try:
        major, minor, *_ = version("torch").split(".")
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


TORCH_RELEASE = _release()
"""Its first two numbers; zeros without torch."""
RECORDS_COLLECTIVES = TORCH_RELEASE >= (2, 8)
"""True if reports of hangs name collectives."""


def needs_torch(major: int, minor: int) -> pytest.MarkDecorator:
    """Return the mark that skips a test if torch is older."""
    return pytest.mark.skipif((major, minor) > TORCH_RELEASE, reason=f"needs torch {major}.{minor}")
