"""Tests of files in which several tests have one name, or which ranks collect in another way than the driver."""

from __future__ import annotations

import pytest

from pytest_accel.features.record.census import RAN, read_job
from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_CONFTEST = """
    import os

    import pytest
    from tests import inner


    def note(name):
        if os.environ["RANK"] == "0":
            inner.note("ran.log", name)


    class CaseFile(pytest.File):
        def collect(self):
            for number, line in enumerate(self.path.read_text().splitlines()):
                case = Case.from_parent(self, name="case")
                case.line = line
                case.add_marker(pytest.mark.distributed(2, kind="cpu", init=False))
                yield case


    class Case(pytest.Item):
        def runtest(self):
            note(self.line)
            assert self.line != "line 1"


    def pytest_collect_file(file_path, parent):
        return CaseFile.from_parent(parent, path=file_path) if file_path.suffix == ".cases" else None


    def pytest_collection_modifyitems(items):
        items.reverse()
        for item in items:
            if isinstance(item, pytest.Function) and item.obj.__doc__:
                item.name = item.obj.__doc__
    """
_TESTS = """
    import unittest

    import pytest
    from conftest import note

    pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)


    @pytest.mark.parametrize("variant", ["base-cased", "cased"])
    @pytest.mark.parametrize("model", ["bert", "bert-base"])
    def test_model(model, variant):
        note(f"{model} {variant}")
        assert (model, variant) != ("bert", "base-cased")


    class TestClass:
        @pytest.mark.parametrize("variant", ["b-c", "c"])
        @pytest.mark.parametrize("model", ["a", "a-b"])
        def test_method(self, model, variant):
            note(f"{model} {variant}")
            assert (model, variant) != ("a-b", "c")


    def test_adds_small():
        "adds"
        note("small")


    def test_adds_large():
        "adds"
        note("large")
        assert False


    class TestOfUnittest(unittest.TestCase):
        def test_of_unittest(self):
            note("unittest")
    """
_METHODS = ["a b-c", "a c", "a-b b-c", "a-b c"]
_RUNS = sorted(
    [
        *("bert base-cased", "bert cased", "bert-base base-cased", "bert-base cased", *_METHODS),
        *("small", "large", "unittest"),
        *("line 0", "line 1", "line 2"),
    ]
)


@pytest.fixture
def named(suite: Suite) -> Suite:
    """Return a suite in which two tests of each kind have one name, and one of the two fails."""
    suite.write("conftest.py", _CONFTEST)
    suite.write("test_it.py", _TESTS)
    suite.write("lines.cases", "line 0\nline 1\nline 2\n")
    return suite


def _ran(suite: Suite) -> list[str]:
    """Return what the tests of the last session have noted."""
    ran = sorted(suite.read("ran.log"))
    (suite.path / "ran.log").unlink()
    return ran


def test_each_of_several_tests_with_one_name_runs_once_and_has_its_own_verdict(named: Suite) -> None:
    run = named.run("test_it.py", "lines.cases", "--accel-record=record.jsonl")
    assert _ran(named) == _RUNS
    assert run.count() == {"PASSED": 10, "FAILED": 4}, run.text
    assert run.result("test_model[bert-base-cased]") == "PASSED FAILED"  # The order is reversed.
    assert run.result("test_method[a-b-c]") == "FAILED PASSED"
    assert sorted(run.result("case").split()) == ["FAILED", *["PASSED"] * 2]

    census = read_job(str(named.path / "record.jsonl")).tests
    assert len(census) == 14 - 2 - 2  # Three cases have one id, and twice two tests.
    assert {outcome.status for outcome in census.values()} <= set(RAN)

    # --lf leaves out children of the file before other plugins see them; an argument selects children by name.
    run = named.run("--lf", "test_it.py")
    # Without the two of TestClass: pytest forgets the failure of an id when a test with this id passes.
    assert _ran(named) == ["bert base-cased", "bert-base cased", "large"]
    assert run.count() == {"FAILED": 2, "PASSED": 1}
    run = named.run("test_it.py::TestClass", "-k", "a-b-c")
    assert _ran(named) == ["a b-c", "a-b c"]


def test_a_test_whose_function_has_other_tests_in_the_ranks_is_an_error(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import os

        import pytest

        pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)
        IN_RANK = "RANK" in os.environ


        @pytest.mark.parametrize("name", ["a", "c" if IN_RANK else "b"])
        def test_names(name):
            pass


        @pytest.mark.parametrize("name", ["b", "a"] if IN_RANK else ["a", "b"])
        def test_set(name):
            pass


        @pytest.mark.parametrize("tail", ["z", "y-z"] if IN_RANK else ["y-z", "z"])
        @pytest.mark.parametrize("head", ["x", "x-y"])
        def test_twins(head, tail):
            pass


        if not IN_RANK:
            def test_elsewhere():
                pass


        class TestClass:
            def test_method(self):
                pass
        """,
    )
    run = suite.run()
    results = {name.rpartition("::")[2]: words for name, words in run.results.items()}
    assert [name for name, words in results.items() if "PASSED" in words] == [
        "test_set[a]",
        "test_set[b]",
        "test_method",
    ]
    assert run.count() == {"ERROR": 7, "PASSED": 3}
    others = ", with other names or in another order; it has"
    for name, number in {"test_names[a]": 2, "test_names[b]": 2, "test_twins[x-y-z]": 4}.items():
        assert f"of {name.partition('[')[0]}, and the driver {number}{others}" in run.failure(name)
    assert "this rank has collected 0 of test_elsewhere, and the driver 1; it has" in run.failure("test_elsewhere")
