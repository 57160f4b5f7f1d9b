"""Packages that tests install: a folder with their metadata, entry points and modules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class InstalledPackages:
    """A folder of installed packages."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put `folder` on ``PYTHONPATH``."""
        self.folder = folder
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))

    def install(self, name: str, group: str, entry_points: str, module: str = "", code: str = "") -> None:
        """Install the distribution `name` with entry points of `group`, and with a `module` with `code`, if given."""
        info = self.folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry_points}\n")
        if module:
            (self.folder / f"{module}.py").write_text(code)

    def install_vendor(self, name: str, entry_points: str, module: str = "", code: str = "") -> None:
        """Install a distribution that publishes kinds of devices."""
        self.install(name, "pytest_accel.vendors", entry_points, module, code)
