"""Tests of marks with lists: each entry makes a test, wherever the mark is, and whichever process or plugin sees it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_accel.features.record.census import read_job
from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "marks.md"


_NOTE = """
    import os
    import unittest

    import pytest
    from tests import inner


    def note(*words):
        if os.environ["RANK"] == "0":
            inner.note("ran.log", os.environ["PYTEST_CURRENT_TEST"].split("::", 1)[1].split(" ")[0], *words)
"""
_CASES = f"""{_NOTE}

    @pytest.mark.distributed([1, 2], init=False)
    class TestBase(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            cls.size = os.environ["WORLD_SIZE"]

        @pytest.fixture(autouse=True)
        def use_name(self, request):
            self.name = request.node.name

        def test_class(self):
            assert self.id().endswith(".test_class") and self.name == "test_class"
            note(self.size)

        @pytest.mark.distributed([2, 3], init=False)
        def test_method(self):
            note(self.size)


    class TestDerived(TestBase):
        def test_method(self):
            note(self.size)


    @pytest.mark.distributed([1, 2], init=False)
    @pytest.mark.parametrize("x", [pytest.param("a", marks=pytest.mark.distributed([2, 3], init=False)), "b", "c"])
    def test_param(x, request, world_size):
        assert request.node.name == f"test_param[world_size={{world_size}}-{{x}}]"
        note(world_size)


    @pytest.mark.parametrize("x", ["a", pytest.param("b", marks=pytest.mark.distributed([1, 2], init=False))])
    def test_one_param(x):
        if x == "b":
            note(os.environ["WORLD_SIZE"])


    @pytest.mark.parametrize("world_size", [2, 1])
    @pytest.mark.distributed([1, 2, 4], backend=["gloo"], init=False)
    def test_own(world_size):
        note(world_size)
"""
_CASE_IDS = [
    *(f"TestBase::test_class[world_size={size}] {size}" for size in (1, 2)),
    *(f"TestBase::test_method[world_size={size}] {size}" for size in (2, 3)),
    *(f"TestDerived::test_class[world_size={size}] {size}" for size in (1, 2)),
    *(f"TestDerived::test_method[world_size={size}] {size}" for size in (1, 2)),
    *(f"test_one_param[world_size={size}-b] {size}" for size in (1, 2)),
    *(f"test_own[backend=gloo-{size}] {size}" for size in (1, 2)),
    *(f"test_param[world_size={size}-a] {size}" for size in (2, 3)),
    *(f"test_param[world_size={size}-{x}] {size}" for size in (1, 2) for x in "bc"),
]


def test_lists_make_tests_of_methods_and_parameters(suite: Suite) -> None:
    suite.write("test_it.py", _CASES)
    run = suite.run("--accel", "none", "-n1")
    assert run.count() == {"PASSED": len(_CASE_IDS) + 1}, run.text
    assert sorted(suite.read("ran.log")) == sorted(_CASE_IDS)


def test_variants_are_selected_by_their_ids(suite: Suite) -> None:
    suite.write("test_it.py", _CASES)

    def collected(*options: str) -> list[str]:
        return re.findall(r"<(?:Function|TestCaseFunction) (.*)>", suite.run("--collect-only", *options).text)

    # The tests of one world size come one after the other.
    variants = ["2-a", "2-b", "2-c", "3-a", "1-b", "1-c"]
    assert collected(
        *("test_it.py::TestDerived::test_method[world_size=2]", "test_it.py::test_param", "test_it.py::test_one_param")
    ) == [
        "test_method[world_size=2]",
        *(f"test_param[world_size={one}]" for one in variants),
        *("test_one_param[a]", "test_one_param[world_size=1-b]", "test_one_param[world_size=2-b]"),
    ]
    assert collected("-k", "world_size and 3 and a") == ["test_method[world_size=3]", "test_param[world_size=3-a]"]
    assert suite.run("test_it.py::TestBase::test_class[world_size=3]").ret == pytest.ExitCode.USAGE_ERROR


def test_the_reference_shows_the_ids(suite: Suite) -> None:
    section = REFERENCE.read_text(encoding="utf-8").partition("### Lists of world sizes and backends")[2]
    code, ids = re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)[:2]
    suite.write("test_it.py", code)
    # The order of the arguments in the mark does not matter.
    suite.write(
        "test_other.py",
        code.replace('[2, "all"], backend=["gloo", "nccl"]', 'backend=["gloo", "nccl"], world_size=[2, "all"]'),
    )
    lines = suite.run("--collect-only", "-q", quiet=True).text.splitlines()
    for file in ("test_it.py", "test_other.py"):
        assert [line.removeprefix(f"{file}::") for line in lines if line.startswith(f"{file}::")] == ids.split()


_HOOKS = """
    import pytest


    def pytest_itemcollected(item):
        if item.name.startswith("test_collected"):
            item.add_marker(pytest.mark.distributed([1, 2], init=False))


    def pytest_collection_modifyitems(items):
        for item in items:
            if item.name == "test_modified":
                item.add_marker(pytest.mark.distributed([1, 2], init=False))
"""


def test_lists_in_marks_of_hooks_divide_tests(suite: Suite) -> None:
    suite.write("conftest.py", _HOOKS)
    suite.write(
        "test_it.py",
        f"""{_NOTE}

    @pytest.mark.parametrize("x", ["a", "world_size=2"])
    def test_collected(x, request):
        assert request.node.name == f"test_collected[world_size={{os.environ['WORLD_SIZE']}}-{{x}}]"
        note()


    def test_modified(request, tmp_path):
        assert tmp_path.name.startswith("test_modified_world_size")
        note()
        assert os.environ["WORLD_SIZE"] == "1"


    @pytest.mark.parametrize("x", ["world_size=2"])
    def test_plain(x):
        pass
    """,
    )
    run = suite.run("--accel-record", "record.json")
    collected = {f"test_collected[world_size={size}-{x}]": "PASSED" for size in (1, 2) for x in ("a", "world_size=2")}
    modified = {"test_modified[world_size=1]": "PASSED", "test_modified[world_size=2]": "FAILED"}
    run.expect({**collected, **modified, "test_plain[world_size=2]": "PASSED"})
    assert sorted(suite.read("ran.log")) == sorted([*collected, *modified])
    # The record does not count the divided tests as left out.
    counted = read_job(str(suite.path / "record.json")).tests
    statuses = {name.partition("::")[2]: one.status for name, one in counted.items()}
    assert statuses == {name: words.split()[0].lower() for name, words in run.outcomes().items()}

    # The command line knows such a test as a whole.
    (command,) = re.findall(r"-+ rerun -+\n(.*)\n", run.text)
    assert command.startswith("pytest test_it.py::test_modified -p")
    assert suite.run("test_it.py::test_modified").count() == {"PASSED": 1, "FAILED": 1}


def test_variants_in_one_world_have_fixtures_and_instances_of_their_own(suite: Suite) -> None:
    """Both run in the same ranks, one after the other, and there they are the same item of pytest."""
    suite.write(
        "test_it.py",
        f"""{_NOTE}

    @pytest.fixture
    def own(request):
        note("setup")
        yield []
        note("teardown")


    class TestClass:
        @pytest.fixture(scope="class")
        @classmethod
        def shared(cls):
            return []

        @pytest.mark.distributed([2, "all"], init=False)
        def test_it(self, own, shared):
            assert not own and not hasattr(self, "used")
            self.used = True
            own.append(1)
            shared.append(1)
            note(len(shared))
    """,
    )
    assert suite.run("--accel", "sim:2").count() == {"PASSED": 2}
    ids = [f"TestClass::test_it[world_size={size}]" for size in ("2", "all")]
    assert suite.read("ran.log") == [
        f"{id} {word}" for number, id in enumerate(ids, 1) for word in ("setup", str(number), "teardown")
    ]
