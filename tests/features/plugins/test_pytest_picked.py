"""Tests of pytest-picked, which selects the tests in files that git reports as changed."""

from __future__ import annotations

import subprocess

import pytest

from tests.features.plugins.conftest import Pair, needs

pytestmark = needs("pytest_picked")


def test_marked_tests_in_changed_files_are_picked(pair: Pair) -> None:
    pair.plugin("picked")
    test = "import pytest\n\n@pytest.mark.distributed(2)\ndef test_{0}(): assert {1}\n\ndef test_{0}_unmarked(): pass\n"
    pair.write("test_same.py", test.format("same", True))
    pair.write("test_other.py", test.format("other", True))
    for one in (pair.plain, pair.marked):
        for command in (("init", "-q"), ("add", "test_same.py", "test_other.py"), ("commit", "-qm", "first")):
            identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid")
            subprocess.run(["git", *identity, *command], cwd=one.path, check=True)
    pair.write("test_other.py", test.format("other", False))
    for option, workers in (("--picked", ()), ("--picked=first", ("-n1",))):
        plain, marked = pair.plain.run(option), pair.marked.run(option, *workers)
        assert marked.outcomes() == plain.outcomes()
        assert marked.ret == plain.ret == pytest.ExitCode.TESTS_FAILED
        assert ("test_same" in marked.outcomes()) == (option != "--picked")
        assert marked.outcomes()["test_other"] == "FAILED"
