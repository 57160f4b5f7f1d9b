"""The one place for what pytest and xdist offer no public way to."""

from __future__ import annotations

from pathlib import Path

import pytest


def base_temporary_directory(config: pytest.Config) -> Path | None:
    """The folder in which a session keeps its temporary directories; None where the tmpdir plugin is off.

    Public only as the fixture `tmp_path_factory`, and the ranks' folders are named before any test runs. xdist takes
    it from the same attribute for its workers.
    """
    factory = getattr(config, "_tmp_path_factory", None)
    return None if factory is None else Path(factory.getbasetemp())
