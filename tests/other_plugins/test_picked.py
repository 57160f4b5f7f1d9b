"""pytest-picked selects marked tests by the files that git says have changed."""

from __future__ import annotations

import subprocess

import pytest

from tests.other_plugins.conftest import Pair, needs

pytestmark = needs("pytest_picked")


@pytest.mark.parametrize("options", [(), pytest.param(("-n2",), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_changed_files_are_picked(pair: Pair, options: tuple[str, ...]) -> None:
    pair.plugin("picked")
    test = "import pytest\n\n@pytest.mark.distributed(2)\ndef test_{0}(): assert {1}\n\ndef test_{0}_unmarked(): pass\n"
    pair.write("test_same.py", test.format("same", True))
    pair.write("test_other.py", test.format("other", True))
    for one in (pair.plain, pair.marked):
        for command in (("init", "-q"), ("add", "test_same.py", "test_other.py"), ("commit", "-qm", "first")):
            identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid")
            subprocess.run(["git", *identity, *command], cwd=one.path, check=True)
    pair.write("test_other.py", test.format("other", False))
    for how in ("--picked", "--picked=first"):
        plain, marked = (one.run(how, *options) for one in (pair.plain, pair.marked))
        assert marked.outcomes() == plain.outcomes()
        assert marked.ret == plain.ret == pytest.ExitCode.TESTS_FAILED
        assert ("test_same" in marked.outcomes()) == (how != "--picked")
        assert marked.outcomes()["test_other"] == "FAILED"
