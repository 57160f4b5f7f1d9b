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


@pytest.mark.parametrize(
    ("deepest", "place"),
    [
        ("/suite/helpers.py", ("/suite/helpers.py", 3)),
        ("helpers.py", ("helpers.py", 3)),
        ("/other/helpers.py", ("/suite/test_it.py", 2)),
        ("/opt/lib/python3.12/contextlib.py", ("/suite/test_it.py", 2)),
        ("/suite/.venv/lib/python3.12/site-packages/torch/functional.py", ("/suite/test_it.py", 2)),
        ("<string>", ("/suite/test_it.py", 2)),
    ],
)
def test_the_place_of_a_failure_is_the_deepest_line_of_the_suite(deepest: str, place: tuple[str, int]) -> None:
    folders = Folders("/suite", "/suite")
    assert (
        folders.place_of_failure([("/opt/lib/python3.12/unittest/case.py", 1), ("/suite/test_it.py", 2), (deepest, 3)])
        == place
    )


def test_the_place_of_a_failure_outside_of_the_suite_is_the_deepest_line_in_no_library() -> None:
    library = "/opt/lib/python3.12/contextlib.py"
    folders = Folders("/suite", "/suite")
    assert folders.place_of_failure([("/other/one.py", 1), ("/other/two.py", 2), (library, 3)]) == ("/other/two.py", 2)
    assert folders.place_of_failure([(library, 1), (library, 3)]) == (library, 3)
