"""Tests of items that are not functions, such as doctests and notebook cells, which rules mark to run in ranks."""

from __future__ import annotations

from tests.features.conftest import Suite

_DOCTESTS = '''
    import os

    def adds_up():
        """
        >>> import torch, torch.distributed as dist
        >>> sum = torch.ones(1)
        >>> dist.all_reduce(sum)
        >>> sum
        tensor([2.])
        >>> getfixture("rank") in (0, 1)
        True
        """

    def differs():
        """
        >>> 2 * 3
        6
        >>> int(os.environ["RANK"]) + 2
        2
        """
    '''
_CUSTOM_ITEMS = """
    import pytest

    class Wrong(Exception):
        def __init__(self, wanted, found):
            super().__init__(f"wanted {wanted}")
            self.wanted, self.found = wanted, found

    class Line(pytest.Item):
        def runtest(self):
            wanted, found = self.name.split("=")
            if eval(found) != int(wanted):
                raise Wrong(wanted, found)

        def repr_failure(self, excinfo):
            return f"{excinfo.value.found} is not {excinfo.value.wanted}"

        def reportinfo(self): return self.path, 0, f"line: {self.name}"

    class Lines(pytest.File):
        def setup(self): assert self.path.exists()

        def collect(self):
            for line in self.path.read_text().splitlines():
                yield Line.from_parent(self, name=line)

    class Checks(pytest.File):
        "Checks a test file, as pytest-mypy and pytest-ruff do."

        def collect(self):
            yield Line.from_parent(self, name="0='RANK' in __import__('os').environ")

    def pytest_collect_file(parent, file_path):
        if file_path.suffix == ".lines":
            return Lines.from_parent(parent, path=file_path)
        if file_path.name == "test_marked.py":
            return Checks.from_parent(parent, path=file_path)
    """


def test_doctests_run_in_ranks(suite: Suite) -> None:
    suite.ini("accel_rules = mod.py: distributed(2, kind='cpu')\n    notes.rst: distributed(2, kind='cpu')")
    suite.write("mod.py", _DOCTESTS)
    suite.write("notes.rst", ">>> import os\n>>> os.environ['WORLD_SIZE']\n'2'\n")
    suite.write("other.py", 'def plain():\n    """\n    >>> __import__("os").environ.get("WORLD_SIZE")\n    """\n')
    run = suite.run("--doctest-modules", "--doctest-glob=*.rst", "-n1")
    assert run.outcomes() == {
        "mod.adds_up": "PASSED",
        "mod.differs": "FAILED",
        "notes.rst": "PASSED",
        "other.plain": "PASSED",
    }, run.text
    assert "Expected:\n    2\nGot:\n    3\n" in run.text
    assert "- rank 1: DocTestFailure: expected '2', got '3'" in run.text
    assert "rank 0: passed\n" in run.text
    assert "pytest mod.py::mod.differs" in run.text
    assert "--doctest-modules '--doctest-glob=*.rst'" in run.text  # The command that repeats the test has them.


def test_custom_items_run_in_ranks_and_format_their_failures(suite: Suite) -> None:
    """`repr_failure` of the item makes the text of a failure from attributes of the exception.

    An item that checks a test file does not have the marks of its tests.
    """
    suite.without_torch()
    suite.ini("accel_rules = sums.lines: distributed(2, kind='cpu', init=False)")
    suite.write("conftest.py", _CUSTOM_ITEMS)
    suite.write("sums.lines", "4=2 + 2\n5=2 + 2\n0=int(__import__('os').environ['RANK'])\n")
    suite.write("plain.lines", "4=2 + 2\n5=2 + 2\n")
    suite.write(
        "test_marked.py",
        """
        import os

        import pytest

        pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)

        def test_in_ranks(): assert "RANK" in os.environ
        """,
    )
    run = suite.run()
    assert [" ".join(words) for name, words in run.results.items() if "lines" in name] == [
        *("PASSED", "FAILED", "PASSED", "FAILED", "FAILED")
    ]
    assert [words for name, words in run.results.items() if "test_marked" in name] == [["PASSED"], ["PASSED"]]
    assert run.text.count("\n2 + 2 is not 5\n") == 2
    assert "- ranks 0-1: Wrong: wanted 5" in run.text
    assert "\nint(__import__('os').environ['RANK']) is not 0\n" in run.text
    assert "rank 1: failed\nrank 0: passed\n" in run.text
