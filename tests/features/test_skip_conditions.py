"""Tests of skips by conditions on RANK and WORLD_SIZE, which are false in ranks only."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.driver.skip_conditions import condition_of
from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_HELPERS = """
    import os

    import pytest


    def requires_ranks(number):
        return pytest.mark.skipif(int(os.environ.get("WORLD_SIZE", "1")) < number, reason=f"needs {number} ranks")
    """
_CONFTEST = """
    import os

    import pytest


    def pytest_collection_modifyitems(items):
        if "WORLD_SIZE" not in os.environ:
            for item in items:
                if item.name == "test_added":
                    item.add_marker(pytest.mark.skip("not launched"))


    def pytest_runtest_setup(item):
        if item.name == "test_slow":
            pytest.skip("needs --slow")
        if item.name == "test_hook" and "RANK" not in os.environ:
            pytest.skip("not launched")
    """
_MARKS = """
    import os
    import unittest

    import pytest

    from helpers import requires_ranks

    pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    launched = pytest.mark.skip("not launched") if size < 2 else pytest.mark.launched


    @pytest.mark.skipif(size < 2, reason="not launched")
    def test_truth():
        pass


    @pytest.mark.skipif("'RANK' not in os.environ")
    def test_text():
        pass


    @pytest.mark.skipif(condition="RANK" not in os.environ, reason="not launched")
    def test_fails(rank):
        assert rank == 0


    @launched
    def test_mark():
        pass


    @unittest.skipUnless(size > 1, "not launched")
    class TestCase(unittest.TestCase):
        def test_class(self):
            pass


    def test_added():
        pass


    def test_hook():
        pass


    def test_slow():
        pass


    @requires_ranks(4)
    def test_four():
        raise AssertionError("ran")


    @pytest.mark.xfail("RANK" not in os.environ, reason="not launched")
    def test_xfail():
        assert size == 1


    @pytest.mark.xfail(size < 2, reason="not launched", run=False)
    class TestNotRun:
        def test_not_run(self):
            assert size == 1


    @pytest.mark.distributed(2, kind="mlu", init=False)
    @pytest.mark.skipif("RANK" not in os.environ, reason="not launched")
    def test_missing():
        pass
    """
_FILES = {
    "test_if.py": """
        import os
        import pytest

        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size < 2:
            pytest.skip("not launched", allow_module_level=True)


        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_it():
            pass
        """,
    "test_by_rule.py": """
        import os
        import pytest

        try:
            os.environ["LOCAL_RANK"]
        except KeyError:
            pytest.skip("not launched", allow_module_level=True)


        def test_it():
            pass
        """,
    # Not named: the first skips for another reason, and the second has no ranks.
    "test_import.py": """
        import os
        import pytest

        pytest.importorskip("not_there")


        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_it():
            assert os.environ["WORLD_SIZE"] == "2"
        """,
    "test_unmarked.py": """
        import os
        import pytest

        if "WORLD_SIZE" not in os.environ:
            pytest.skip("not launched", allow_module_level=True)


        def test_it():
            pass
        """,
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="plain"),
        pytest.param(("--accel-strict", "-n1"), id="worker", marks=pytest.mark.long),
    ],
)
def test_ranks_evaluate_the_conditions_of_their_tests(suite: Suite, options: tuple[str, ...]) -> None:
    suite.ini("accel_rules = test_by_rule.py: distributed(2)\nmarkers = launched: in ranks")
    suite.write("conftest.py", _CONFTEST)
    suite.write("helpers.py", _HELPERS)
    suite.write("test_marks.py", _MARKS)
    for name, text in _FILES.items():
        suite.write(name, text)
    run = suite.run(*options)

    passed = ("test_truth", "test_text", "test_mark", "test_class", "test_added")
    skipped = ("test_slow", "test_four")
    hook = "ERROR" if options else "SKIPPED"
    run.expect(
        {**dict.fromkeys(passed, "PASSED"), **dict.fromkeys(skipped, "SKIPPED"), "test_fails": "FAILED"}
        | dict.fromkeys(("test_xfail", "test_not_run"), "FAILED")
        | {"test_hook": hook, "test_missing": hook}
    )
    lines = run.text.partition(f"accel: {'failed' if options else 'skipped'} by a condition on what only ranks have")[2]
    assert sorted(lines.split("\nOnly ranks have these, ")[0].splitlines()[1:]) == [
        "conftest.py:18: RANK: 1 test",
        "test_by_rule.py:8: LOCAL_RANK: the whole file test_by_rule.py",
        "test_if.py:7: WORLD_SIZE: the whole file test_if.py",
    ]
    if options:
        text = "skipped by a condition on what only ranks have: conftest.py:18: RANK (--accel-strict)"
        assert text in run.failure("test_hook")
        assert "needs 2 mlu devices; there is none (--accel-strict)" in run.failure("test_missing")


def test_a_file_that_skips_itself_fails_a_strict_session(suite: Suite) -> None:
    suite.write("test_if.py", _FILES["test_if.py"])
    suite.write("test_it.py", "def test_plain():\n    pass\n")
    assert suite.run().ret == pytest.ExitCode.OK
    run = suite.run("--accel-strict")
    run.expect({"test_plain": "PASSED"})
    assert run.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nif os.environ.get('RANK') is None:\n    skip()  #", "RANK"),
        ("import os\nif 'RANK' in os.environ:\n    x = 1\nelse:\n    skip()  #", "RANK"),
        ("import os\nskip() if 'RANK' in os.environ else None  #", "RANK"),
        ("def ranks():\n    return getenv('WORLD_SIZE')\nif not ranks():\n    skip()  #", "WORLD_SIZE"),
        ("a = getenv('WORLD_SIZE')\nb = a or '1'\nif int(b) < 2:\n    skip()  #", "WORLD_SIZE"),
        ("def setup(item):\n    if 'RANK' in environ:\n        return\n    skip()  #", "RANK"),
        ("from mpi4py import MPI\nif MPI.COMM_WORLD.size < 2:\n    skip()  #", "COMM_WORLD"),
        (
            "import torch.distributed as dist\nif not dist.is_torchelastic_launched():\n    skip()  #",
            "is_torchelastic_launched",
        ),
        # Other conditions, in files that mention the variables.
        ("RANK = 0\nskip()  #", None),
        ("a = b\nb = a\nif a:\n    skip()  #\nRANK", None),
        ("if 'RANK' in environ:\n    x = 1\nif y:\n    skip()  #", None),
        ("def setup(item):\n    if 'RANK' in environ:\n        x = 1\n    skip()  #", None),
        ("def setup(item):\n    skip()  #\n    if 'RANK' in environ:\n        return", None),
        ("def setup(item):\n    rank = environ['RANK']\n    if x:\n        skip()  #", None),
        ("if x:\n    skip('set RANK')  #", None),
        ("if 'WORLD' in environ:\n    skip()  #", None),
        ("if 'RANK' in environ:\n    skip(  #", None),
    ],
)
def test_a_condition_is_found_in_the_source(tmp_path: Path, source: str, expected: str | None) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(source)
    line = 1 + source[: source.index("#")].count("\n")
    found = condition_of((str(path), line, "Skipped: x"), tmp_path)
    assert found == (expected and f"test_it.py:{line}: {expected}")
