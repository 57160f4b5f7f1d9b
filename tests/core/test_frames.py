"""Tests of the distinction of the user's code from that of libraries."""

from __future__ import annotations

import pytest

from pytest_accel.core.frames import PACKAGE, Folders, is_library


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/.venv/lib/python3.11/site-packages/torch/nn/functional.py", "torch/nn/functional.py"),
        ("/usr/lib/python3.11/threading.py", "threading.py"),
        ("/usr/lib/python3.13t/threading.py", "threading.py"),
    ],
)
def test_files_of_python_and_of_packages_are_not_the_users(path: str, shown: str) -> None:
    assert is_library(path)
    assert not Folders("/home/me").is_own(path)
    assert Folders("/home/me").shown(path) == shown


def test_files_of_this_package_are_not_the_users() -> None:
    assert is_library(f"{PACKAGE}plugin.py")
    assert not Folders(PACKAGE).is_own(f"{PACKAGE}plugin.py")


@pytest.mark.parametrize("name", ["tests/test_a.py", "lib/python_tools/tests/test_a.py", "lib/python/test_a.py"])
def test_other_files_in_rootdir_are_the_users(name: str) -> None:
    path = f"/home/me/{name}"
    assert not is_library(path)
    assert Folders("/home/me").is_own(path)
    assert Folders("/home/me").shown(path) == name
