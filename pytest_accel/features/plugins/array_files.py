"""pytest-arraydiff: the reference files of ``--arraydiff-generate-path``."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.features.plugins.internals import of_class, require
from pytest_accel.features.plugins.reference_files import GeneratedFiles, ReferenceFiles

_NAME = "pytest-arraydiff"


def rank_plugin(config: pytest.Config) -> object | None:
    """Have a rank generate into a folder of its own."""
    plugin = _generator(config)
    if plugin is None:
        return None
    files = GeneratedFiles(config, _NAME)
    plugin.generate_dir = str(files.folder)
    return files


def driver_plugin(config: pytest.Config) -> object | None:
    """Write what the ranks have generated."""
    plugin = _generator(config)
    return None if plugin is None else ReferenceFiles(plugin.generate_dir)


def _generator(config: pytest.Config) -> Any:
    """Return the plugin's object that compares and generates; None if the session does not generate."""
    plugin = of_class(config, "pytest_arraydiff.plugin", "ArrayComparison")
    if plugin is None:
        return None
    require(plugin, "generate_dir")
    return None if plugin.generate_dir is None else plugin
