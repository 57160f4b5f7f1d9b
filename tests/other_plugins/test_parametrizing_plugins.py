"""Tests of plugins that parametrize tests with cases or with fixtures (pytest-cases, pytest-lazy-fixtures)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

_CASES = """
    import os

    import pytest
    from pytest_cases import fixture, fixture_union, lazy_value, parametrize, parametrize_with_cases

    in_ranks = pytest.mark.distributed(2, device="cpu")


    def case_two():
        return 2


    @parametrize(n=[3, -1])
    def case_many(n):
        return n


    @in_ranks
    @parametrize_with_cases("value", cases=".")
    def test_of_cases(value):
        assert value > 0


    @parametrize_with_cases("value", cases=".")
    def test_of_cases_here(value):
        assert value > 0


    @fixture(scope="module")
    @parametrize(size=[1, 2])
    def small(size):
        yield size


    @fixture
    def large():
        return 100


    either = fixture_union("either", [small, large])


    @in_ranks
    def test_of_a_union(either):
        assert either in (1, 2)


    def later():
        return os.getpid()


    @in_ranks
    @parametrize("value", [1, lazy_value(later), large])
    def test_of_lazy_values(value):
        assert value in (1, 100, os.getpid())
    """
_LAZY_FIXTURES = """
    import pytest
    from pytest_lazy_fixtures import lf, lfc

    in_ranks = pytest.mark.distributed(2, device="cpu")


    @pytest.fixture(params=[1, 2])
    def number(request):
        return request.param


    @pytest.fixture
    def word():
        return "word"


    @in_ranks
    @pytest.mark.parametrize("value", [lf("number"), lf("word"), lfc(lambda n: n + 100, lf("number"))])
    def test_of_fixtures(value):
        assert value in (1, "word", 101)


    @pytest.mark.parametrize("value", [lf("number"), [lf("word"), 3]])
    def test_of_fixtures_here(value):
        assert value in (1, ["word", 3])
    """


@pytest.mark.parametrize(
    ("names", "tests"),
    [
        pytest.param(["cases"], _CASES, marks=needs("pytest_cases"), id="cases"),
        pytest.param(["pytest_lazyfixture"], _LAZY_FIXTURES, marks=needs("pytest_lazy_fixtures"), id="lazy-fixtures"),
    ],
)
def test_marked_and_unmarked_tests_are_parametrized_alike(pair: Pair, names: list[str], tests: str) -> None:
    pair.plugin(*names)
    pair.write("test_made.py", tests)

    plain = pair.plain.run()
    if "Error while loading plugin" in plain.errors:
        pytest.skip(f"{names} do not load with pytest {pytest.__version__}")
    marked = pair.marked.run()
    assert marked.results == plain.results
    assert marked.ret == plain.ret == pytest.ExitCode.TESTS_FAILED
