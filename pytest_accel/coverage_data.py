"""The coverage of the main process, and the data files of its ranks, which it adds to its own data when they exit.

`rank/coverage.py` measures the ranks.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.interpreter import COVERAGE_SETTINGS_FILE

if TYPE_CHECKING:
    from coverage import Coverage

_OLDEST = "7.10.3"
"""The first release of coverage that can serialize its settings for another process."""


class DriverCoverage:
    """The coverage of the main process, and a folder in which the ranks write their data files."""

    def __init__(self, coverage: Coverage, parent: Path | None) -> None:
        """Make the folder in `parent`, or in the system's temporary directory if `parent` is None."""
        self._coverage = coverage
        self._folder = tempfile.mkdtemp(prefix="accel-coverage-", dir=parent)

    @property
    def settings(self) -> str:
        """The ranks' settings, serialized for `coverage.process_startup`."""
        config = self._coverage.config.copy()
        config.data_file = os.path.join(self._folder, os.path.basename(config.data_file))
        config.parallel = True
        return config.serialize()

    def combine(self) -> list[str]:
        """Add the ranks' data to this process's data; return the errors of files that could not be read."""
        from coverage import CoverageData
        from coverage.exceptions import CoverageException

        problems = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = self._coverage.get_data()
        for file in Path(self._folder).glob("*"):
            try:
                own.update(CoverageData(str(file)))
            except CoverageException as error:  # For example, the rank was killed while it wrote the file.
                problems.append(str(error))
        shutil.rmtree(self._folder, ignore_errors=True)
        return problems


def of_this_process(config: pytest.Config) -> Coverage | None:
    """Return the `Coverage` object that measures this process, pytest-cov's or another; None if there is none."""
    controller = getattr(config.pluginmanager.get_plugin("_cov"), "cov_controller", None)
    coverage = getattr(controller, "cov", None)
    if coverage is None:
        current = getattr(getattr(sys.modules.get("coverage"), "Coverage", None), "current", None)
        coverage = current() if current is not None else None
    return coverage


def shortcoming(coverage: Coverage) -> str | None:
    """Return the reason why this release of coverage cannot measure ranks; None if it can."""
    if hasattr(coverage.config, "serialize"):
        return None
    release = sys.modules["coverage"].__version__
    return f"coverage {release} does not measure what ranks run: install coverage {_OLDEST} or newer"


def for_children(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the user's variable that makes coverage measure the processes that a test starts, if it is set."""
    return (
        ((COVERAGE_SETTINGS_FILE, environment[COVERAGE_SETTINGS_FILE]),)
        if COVERAGE_SETTINGS_FILE in environment
        else ()
    )
