"""Tests of items that are not functions, such as doctests and notebook cells, which rules mark to run in ranks."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.other_plugins.conftest import Pair

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


    def raises():
        """
        >>> raise ValueError("no such file")
        """


    def skipped():
        """
        >>> 1 / 0  # doctest: +SKIP
        """
    '''
_CELLS = [
    ("import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nprint(dist.get_world_size())", "2"),
    ("total = torch.ones(1)\ndist.all_reduce(total)\nprint(total.item())", "2.0"),
    ("# NBVAL_SKIP\n1 / 0", ""),
    ("print('this')", "that"),
    ("print(total.item())", "2.0"),
    ("print(int(os.environ['RANK']) + 7)", "7"),
]
"""Code and expected output of each cell. Later cells use modules and variables of earlier ones."""
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

        def reportinfo(self):
            return self.path, 0, f"line: {self.name}"


    class Lines(pytest.File):
        def setup(self):
            assert self.path.exists()

        def collect(self):
            for line in self.path.read_text().splitlines():
                yield Line.from_parent(self, name=line)


    def pytest_collect_file(parent, file_path):
        if file_path.suffix == ".lines":
            return Lines.from_parent(parent, path=file_path)
    """


def _make_notebook(cells: list[tuple[str, str]]) -> str:
    """Return the text of a notebook with `cells`: code and expected output of each."""
    json_cells = [
        {
            "cell_type": "code",
            "id": f"cell{number}",
            "execution_count": number + 1,
            "metadata": {},
            "source": source,
            "outputs": [{"output_type": "stream", "name": "stdout", "text": f"{output}\n"}] if output else [],
        }
        for number, (source, output) in enumerate(cells)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": json_cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_doctests_run_in_ranks(suite: Suite, workers: tuple[str, ...]) -> None:
    suite.ini("accel_rules = mod.py: distributed(2, device='cpu')\n    notes.rst: distributed(2, device='cpu')")
    suite.write("mod.py", _DOCTESTS)
    suite.write("notes.rst", ">>> import os\n>>> os.environ['WORLD_SIZE']\n'2'\n")
    suite.write("other.py", 'def plain():\n    """\n    >>> __import__("os").environ.get("WORLD_SIZE")\n    """\n')
    run = suite.run("--doctest-modules", "--doctest-glob=*.rst", *workers)
    assert run.outcomes() == {
        "mod.adds_up": "PASSED",
        "mod.differs": "FAILED",
        "mod.raises": "FAILED",
        "mod.skipped": "SKIPPED",
        "notes.rst": "PASSED",
        "other.plain": "PASSED",
    }, run.text
    assert "Expected:\n    2\nGot:\n    3\n" in run.text
    assert "- rank 1: DocTestFailure: expected '2', got '3'" in run.text
    assert "rank 0: passed\n" in run.text
    assert "UNEXPECTED EXCEPTION: ValueError('no such file')" in run.text
    assert "pytest mod.py::mod.differs" in run.text
    assert "--doctest-modules '--doctest-glob=*.rst'" in run.text  # The command that repeats the test has them.


def test_custom_items_run_in_ranks_and_format_their_failures(suite: Suite) -> None:
    """`repr_failure` of the item makes the text of a failure from attributes of the exception."""
    suite.ini("accel_rules = sums.lines: distributed(2, device='cpu')")
    suite.write("conftest.py", _CUSTOM_ITEMS)
    suite.write("sums.lines", "4=2 + 2\n5=2 + 2\n0=int(__import__('os').environ['RANK'])\n")
    suite.write("plain.lines", "4=2 + 2\n5=2 + 2\n")
    run = suite.run()
    assert [" ".join(words) for words in run.results.values()] == ["PASSED", "FAILED", "PASSED", "FAILED", "FAILED"]
    assert run.text.count("\n2 + 2 is not 5\n") == 2
    assert "- ranks 0-1: Wrong: wanted 5" in run.text
    assert "\nint(__import__('os').environ['RANK']) is not 0\n" in run.text
    assert "rank 1: failed\nrank 0: passed\n" in run.text


@needs("nbval", "ipykernel")
def test_notebook_cells_run_in_ranks(pair: Pair) -> None:
    """The cells of a notebook share one kernel in each rank, which the collector starts before the first cell."""
    pair.plugin("nbval.plugin")
    pair.marked.ini("accel_rules = ranks.ipynb: distributed(2, device='cpu')")
    pair.marked.write("ranks.ipynb", _make_notebook(_CELLS))
    pair.write("alone.ipynb", _make_notebook([("x = 1\nprint(x)", "1"), ("print(x)", "2")]))
    args = ("--nbval", "-Wdefault")
    expected = pair.plain.run(*args).results
    assert len(expected) == 2
    for workers in ((), ("-n1", "--dist=loadfile")):
        marked = pair.marked.run("--accel-leaks=fail", *args, *workers)
        words = [" ".join(results) for name, results in marked.results.items() if "ranks" in name]
        assert words == ["PASSED", "PASSED", "SKIPPED", "FAILED", "PASSED", "FAILED"], marked.text
        assert "- ranks 0-1: NbCellError: Cell outputs differ\n" in marked.text
        assert "'7\\n' == '8\\n'" in marked.text
        assert "rank 1: failed\nrank 0: passed\n" in marked.text
        assert {name: results for name, results in marked.results.items() if "alone" in name} == expected


@needs("nbmake", "ipykernel")
def test_notebooks_that_are_one_item_run_in_ranks(pair: Pair) -> None:
    pair.plugin("nbmake.pytest_plugin")
    pair.marked.ini("accel_rules = *.ipynb: distributed(2, device='cpu')")
    pair.write("good.ipynb", _make_notebook([("number = 2", ""), ("assert number == 2", "")]))
    pair.write("bad.ipynb", _make_notebook([("number = 2", ""), ("assert number == 3", "")]))
    plain, marked = (one.run("--nbmake", "-Wdefault") for one in (pair.plain, pair.marked))
    assert marked.results == plain.results
    assert marked.outcomes() == {"good.ipynb": "PASSED", "bad.ipynb": "FAILED"}
    # A rank whose kernel starts 3 s later than that of the other is stopped.
    assert re.search(r"- ranks? [01](-1)?: NotebookFailedException: ", marked.text)


_DOCUMENT = """
    # Title

    ```python
    import os
    assert len(os.environ.get("RANK", "0")) == 1
    ```

    <!-- more -->

    ```python
    assert 1 == 2
    ```
    """


@needs("pytest_markdown_docs", "pytest_codeblocks", "sybil")
def test_code_blocks_in_documents_run_in_ranks(pair: Pair) -> None:
    """Three plugins collect code blocks: each has some blocks of the documents."""
    pair.plugin("pytest_markdown_docs.plugin", "pytest_codeblocks.plugin")
    pair.marked.ini("accel_rules = *.md: distributed(2, device='cpu')\n    *.rst: distributed(2, device='cpu')")
    pair.write("README.md", _DOCUMENT)
    pair.write("guide.rst", "Title\n=====\n\n>>> number = 2\n>>> number\n2\n>>> number\n3\n>>> number + 1\n3\n")
    pair.write(
        "conftest.py",
        """
        from sybil import Sybil
        from sybil.parsers.rest import DocTestParser

        pytest_collect_file = Sybil(parsers=[DocTestParser()], pattern="*.rst").pytest()
        """,
    )
    args = ("--markdown-docs", "--codeblocks", "-Wdefault")
    plain, marked = pair.plain.run(*args), pair.marked.run(*args)
    assert marked.results == plain.results
    assert marked.count() == {"PASSED": 5, "FAILED": 3}
    assert "Expected:\n    3\nGot:\n    2\n" in marked.text
    assert "- ranks 0-1: SybilFailure: " in marked.text


@needs("pytest_doctestplus")
def test_comparisons_of_doctestplus_work_in_ranks(pair: Pair) -> None:
    pair.plugin("pytest_doctestplus.plugin")
    pair.marked.ini("accel_rules = mod.py: distributed(2, device='cpu')")
    doctest = 'def {}():\n    """\n    >>> 0.1 + 0.2{}\n    0.3\n    """\n\n\n'
    pair.write("mod.py", doctest.format("close", "  # doctest: +FLOAT_CMP") + doctest.format("exact", ""))
    plain, marked = (one.run("--doctest-plus", "--doctest-modules") for one in (pair.plain, pair.marked))
    assert marked.results == plain.results
    assert marked.outcomes() == {"mod.close": "PASSED", "mod.exact": "FAILED"}
