"""Tests of Hypothesis on several ranks: all run the same examples and report one minimal failing example."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.run import Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hypothesis") is None, reason="needs hypothesis")

_HEADER = """
import os

import pytest
from hypothesis import HealthCheck, Phase, assume, example, given, seed, settings, target
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

pytestmark = pytest.mark.distributed(2, kind="cpu")
quick = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
settings.register_profile("suite", deadline=None, database=None, max_examples=50, phases=quick)
settings.load_profile("suite")


def meet():
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def own_rank():
    return int(os.environ["RANK"])


def note(name, value):
    with open(f"{name}.{os.environ['RANK']}", "a") as file:
        print(value, file=file)
"""


def _write(suite: Suite, text: str) -> None:
    suite.plugin("_hypothesis_pytestplugin")
    (suite.path / "test_examples.py").write_text(_HEADER + text)


def _failure(run: Run, test: str) -> str:
    """Return the report of `test`; fail unless it has exactly one failing example."""
    text = run.failure(test)
    assert len(re.findall("Failing (?:test case|explicit example)|Falsifying", text)) == 1, text
    return text


def test_a_failure_is_shrunk_on_all_ranks_at_once(suite: Suite) -> None:
    _write(
        suite,
        """
@given(x=st.integers())
def test_on_one_rank(x, rank):
    meet()
    assert rank == 0 or x < 100


@given(xs=st.lists(st.integers(0, 9)))
def test_on_all_ranks(xs):
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(len(xs))])
    dist.all_reduce(total)
    assert total.item() < 6


@given(x=st.integers())
def test_on_one_rank_or_all(x, rank):
    # Both fail at first, and only one in the smallest example.
    meet()
    assert x < 1000 * (2 - rank)


@given(data=st.data())
def test_before_it_draws_more(data, rank):
    first = data.draw(st.integers(0, 1000))
    assert rank == 0 or first < 50
    data.draw(st.binary())
    meet()


@example(x=77)
@given(x=st.integers(0, 9))
def test_explicit(x, rank):
    meet()
    assert rank == 0 or x < 77


@example(x=77).xfail(raises=AssertionError)
@given(x=st.integers(0, 9))
def test_explicit_that_is_expected(x, rank):
    meet()
    assert rank == 0 or x < 77


@given(x=st.integers().map(lambda x: x // (x < 11 or own_rank() == 0)))
def test_in_a_strategy(x):
    pass


class TestClass:
    @pytest.mark.parametrize("limit", [100, 200])
    @given(x=st.integers())
    def test_method(self, x, rank, limit):
        meet()
        assert rank == 0 or x < limit


def test_in_the_body(rank):
    for limit in (10, 5):

        @given(x=st.integers(0, 9))
        def check(x):
            meet()
            assert rank == 0 or x < limit

        check()


@given(x=st.integers())
def test_passes_afterwards(x, rank):
    target(float(x % 100) * (rank + 1))
    meet()
    assume(x % 7 or rank)
    note("passes", x)
""",
    )
    run = suite.run()
    assert run.outcomes() == {
        "test_on_one_rank": "FAILED",
        "test_on_all_ranks": "FAILED",
        "test_on_one_rank_or_all": "FAILED",
        "test_before_it_draws_more": "FAILED",
        "test_explicit": "FAILED",
        "test_explicit_that_is_expected": "PASSED",
        "test_in_a_strategy": "FAILED",
        "test_method[100]": "FAILED",
        "test_method[200]": "FAILED",
        "test_in_the_body": "FAILED",
        "test_passes_afterwards": "PASSED",
    }
    text = _failure(run, "test_on_one_rank")
    assert re.search(r"x=100,", text)
    assert "E       assert (1 == 0 or 100 < 100)" in text
    assert re.search(r"rank 1: failed at test_examples.py:\d+$", text, re.MULTILINE)
    assert re.search(r"rank 0: failed as a consequence: an example failed on rank 1 at test_examples.py:\d+", text)
    assert "- rank 1: assert (1 == 0 or 100 < 100)" in run.text
    text = _failure(run, "test_on_all_ranks")
    assert "xs=[0, 0, 0]" in text
    assert "ranks 0-1: failed at test_examples.py" in text
    assert "x=1000," in _failure(run, "test_on_one_rank_or_all")
    assert "Draw 1: 50" in _failure(run, "test_before_it_draws_more")
    assert "x=77," in _failure(run, "test_explicit")
    assert "x = 11" in run.failure("test_in_a_strategy")
    assert "x=100," in _failure(run, "TestClass.test_method[100]")
    assert "x=200," in _failure(run, "TestClass.test_method[200]")
    assert "x=5," in _failure(run, "test_in_the_body")
    assert len(suite.read("passes.0")) >= 50
    assert set(suite.read("passes.0")) < set(suite.read("passes.1"))


@pytest.mark.long
def test_state_machines_deadlines_and_tests_with_one_rank(suite: Suite) -> None:
    """All ranks take the same steps, the slowest rank counts, and one rank runs Hypothesis without changes."""
    _write(
        suite,
        """
import time


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.sum = 0

    @rule(x=st.integers(0, 3))
    def add(self, x):
        meet()
        self.sum += x

    @invariant()
    def is_small(self):
        assert own_rank() == 0 or self.sum <= 3


few = settings(max_examples=20, stateful_step_count=5)


class TestMachine(Machine.TestCase):
    settings = few


def test_machine_in_the_body():
    run_state_machine_as_test(Machine, settings=few)


# Advance the clock that measures examples instead of waiting: no real delay comes near the deadline.
slept = 0.0
clock = time.perf_counter
time.perf_counter = lambda: clock() + slept


def sleep(seconds):
    global slept
    slept += seconds


@settings(deadline=100_000)
@given(slow=st.booleans())
def test_slow_on_one_rank(slow, rank):
    meet()
    if rank == 1 and slow:
        sleep(150)


connected = []


@settings(deadline=100_000, max_examples=5)
@given(x=st.integers())
def test_slow_at_first(x, rank):
    if rank == 1 and not connected:
        connected.append(x)
        sleep(150)
""",
    )
    one_rank = """
pytestmark = pytest.mark.devices(1)


@given(x=st.integers())
def test_alone(x):
    assert x < 100


def test_is_as_hypothesis_made_it():
    from hypothesis import core

    assert core.StateForActualGivenExecution.__module__ == "hypothesis.core"
"""
    (suite.path / "test_one_rank.py").write_text(_HEADER + one_rank)
    run = suite.run()
    assert run.outcomes() == {
        "runTest": "FAILED",
        "test_machine_in_the_body": "FAILED",
        "test_slow_on_one_rank": "FAILED",
        "test_slow_at_first": "PASSED",
        "test_alone": "FAILED",
        "test_is_as_hypothesis_made_it": "PASSED",
    }
    for name in ("TestMachine.runTest", "test_machine_in_the_body"):
        text = _failure(run, name)
        assert "assert (1 == 0 or 4 <= 3)" in text
        assert len(re.findall(r"state\.add\(x=", text)) == 2
    text = _failure(run, "test_slow_on_one_rank")
    assert "DeadlineExceeded: Test took" in text
    assert "slow=True," in text
    assert "rank 1 was the slowest" in text
    assert "ranks 0-1: failed" in text
    assert "x=100," in _failure(run, "test_alone")


@pytest.mark.long
def test_ranks_that_draw_or_end_differently_are_reported(suite: Suite) -> None:
    _write(
        suite,
        """
@pytest.fixture
def meets_at_the_end():
    yield
    meet()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(x=st.integers())
def test_fails_before_a_collective(x, rank, meets_at_the_end):
    assert rank == 0 or x < 100
    meet()


class Machine(RuleBasedStateMachine):
    @rule(x=st.integers(0, 100))
    def meet_or_fail(self, x):
        assert own_rank() == 0 or x < 50
        meet()


class TestMachine(Machine.TestCase):
    pass


@given(data=st.data())
def test_draws_what_the_rank_says(data, rank):
    data.draw(st.integers(5, 9) if rank == 0 else st.binary(min_size=2))


@given(data=st.data())
def test_draws_as_often_as_the_rank_says(data, rank):
    for _ in range(rank + 1):
        data.draw(st.integers(5, 9))


@given(x=st.integers(0, 9))
def test_skips_on_one_rank(x, rank):
    if rank == 1 and x == 3:
        pytest.skip("not here")


@given(x=st.integers(0, 9))
def test_skips_on_all_ranks(x):
    if x == 3:
        pytest.skip("nowhere")


@given(x=st.integers(0, 9))
def test_assumes_what_never_is(x):
    assume(False)


@given(x=st.integers(0, 9))
def test_rejects_before_a_collective(x, rank):
    assume(rank == 0 or x != 3)
    meet()


@given(x=st.integers(0, 9))
def test_returns_something_on_one_rank(x, rank):
    return rank or None


def test_afterwards():
    meet()
""",
    )
    run = suite.run()
    assert run.outcomes() == {
        "test_fails_before_a_collective": "FAILED",
        "runTest": "FAILED",
        "test_draws_what_the_rank_says": "FAILED",
        "test_draws_as_often_as_the_rank_says": "FAILED",
        "test_skips_on_one_rank": "FAILED",
        "test_skips_on_all_ranks": "SKIPPED",
        "test_assumes_what_never_is": "FAILED",
        "test_rejects_before_a_collective": "FAILED",
        "test_returns_something_on_one_rank": "FAILED",
        "test_afterwards": "PASSED",
    }
    text = _failure(run, "test_fails_before_a_collective")
    assert re.search(r"E +assert \(1 == 0 or \d+ < 100\)", text)
    assert re.search(r"Failing test case: test_fails_before_a_collective\(.*x=\d+.*\)", text)
    assert "(not shrunk: rank 0 did not reach the end of the example within 6 s)" in text
    # The collective of rank 1's teardown may meet that of rank 0's example before rank 0 is terminated.
    place = r"still running at test_examples.py:\d+ in (meet|test_fails_before_a_collective)"
    assert re.search(rf"rank 0: {place} when it was stopped 3 s after rank 1 failed", text)
    assert "[rank 0] stacks" in text
    text = _failure(run, "TestMachine.runTest")
    assert re.search(r"Failing test case: <state machine>, which drew \(.*\d+,?\)", text)
    assert "(not shrunk: rank 0 did not reach the end" in text
    text = run.failure("test_draws_what_the_rank_says")
    assert "ExamplesDiffer: the ranks drew different examples (rank 0 drew (5,); rank 1 drew (b'" in text
    assert "what a test draws must not depend on the rank" in text
    assert "ranks 0-1: failed at test_examples.py" in text
    text = run.failure("test_draws_as_often_as_the_rank_says")
    assert "(rank 0 drew (5,); rank 1 drew (5,) and draws more)" in text
    text = _failure(run, "test_skips_on_one_rank")
    assert "the ranks disagree about an example: rank 1 skipped, rank 0 ran" in text
    assert "Failing test case: test_skips_on_one_rank(rank=0, x=3)" in text
    assert "hypothesis.errors.Unsatisfiable" in run.failure("test_assumes_what_never_is")
    text = run.failure("test_rejects_before_a_collective")
    assert "rank 1 rejected an example, and rank 0 did not reach the end of the example within 10 s" in text
    assert "Failing test case: test_rejects_before_a_collective(rank=1, x=3)" in text
    place = r"still running at test_examples.py:\d+ in meet when it was stopped 3 s after rank 1 failed"
    assert re.search(f"rank 0: {place}", text)
    text = run.failure("test_returns_something_on_one_rank")
    assert re.search("E +.*FailedHealthCheck: Tests run under @given should return None", text)
    assert "rank 0: failed as a consequence: an example failed on rank 1" in text


_RECORDING_TESTS = """
kept = DirectoryBasedExampleDatabase("examples")
settings.register_profile("kept", deadline=None, max_examples=50, phases=quick, database=kept)
settings.load_profile("kept")


@given(x=st.integers())
def test_drawn(x):
    note("drawn", x)


@seed(3)
@settings(database=None)
@given(x=st.integers())
def test_seed(x):
    note("seed", x)


@settings(derandomize=True, database=None)
@given(x=st.integers())
def test_derandomized(x):
    note("derandomized", x)


@given(x=st.integers(), y=st.integers())
def test_found(x, y, rank):
    note("found", f"x={x},")
    meet()
    assert rank == 0 or x < 1000
"""


@pytest.mark.long
def test_all_ranks_use_one_seed_and_one_database(suite: Suite) -> None:
    """Seeds, `derandomize` and the database give all ranks the same examples."""
    _write(suite, _RECORDING_TESTS)
    names = ("drawn", "seed", "derandomized", "found")
    sessions: list[dict[str, list[str]]] = []
    for options in ((), (), ("--hypothesis-seed=5",), ("--hypothesis-seed=5",)):
        run = suite.run(*options)
        assert run.result("test_found") == "FAILED"
        assert "x=1000," in _failure(run, "test_found")
        for name in names:
            assert suite.read(f"{name}.0") == suite.read(f"{name}.1"), name
        sessions.append({name: suite.read(f"{name}.0") for name in names})
        for name in names:
            for rank in (0, 1):
                (suite.path / f"{name}.{rank}").unlink()
    first, second, third, fourth = sessions
    assert first["drawn"] != second["drawn"]
    assert first["seed"] == second["seed"]
    assert first["derandomized"] == second["derandomized"]
    assert first["found"][0] != second["found"][0] == "x=1000,"
    assert third["drawn"] == fourth["drawn"]
    assert third["found"] == fourth["found"]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("pytest_asyncio") is None, reason="needs pytest-asyncio")
@pytest.mark.skipif(importlib.util.find_spec("anyio") is None, reason="needs anyio")
def test_examples_of_async_tests_and_unittest_on_two_workers(suite: Suite) -> None:
    _write(
        suite,
        """
import unittest


@pytest.mark.asyncio
@given(x=st.integers())
async def test_asyncio(x, rank):
    meet()
    assert rank == 0 or x < 100


@pytest.mark.asyncio
@given(x=st.integers())
async def test_asyncio_passes(x, rank):
    meet()


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
@given(x=st.integers())
async def test_anyio(x, rank, anyio_backend):
    meet()
    assert rank == 0 or x < 100


class TestCase(unittest.TestCase):
    @given(x=st.integers())
    def test_unittest(self, x):
        meet()
        assert own_rank() == 0 or x < 100
""",
    )
    suite.all_plugins()
    run = suite.run("-n2")
    assert run.outcomes() == {
        "test_asyncio": "FAILED",
        "test_asyncio_passes": "PASSED",
        "test_anyio": "FAILED",
        "test_unittest": "FAILED",
    }
    for name in ("test_asyncio", "test_anyio", "TestCase.test_unittest"):
        assert "x=100," in _failure(run, name)
