"""Tests of Hypothesis on several ranks: all run the same examples, and a failure names its example."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hypothesis") is None, reason="needs hypothesis")

_HEADER = """
import os

import pytest
from hypothesis import assume, example, given, reproduce_failure, seed, settings, target
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

pytestmark = pytest.mark.distributed(2, kind="cpu")
settings.register_profile("suite", max_examples=50)
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


def test_the_ranks_run_the_same_examples_and_a_failure_names_its_example(suite: Suite) -> None:
    _write(
        suite,
        """
@given(x=st.integers())
def test_on_one_rank(x, rank):
    meet()
    assert rank == 0 or x < 100


@given(xs=st.lists(st.integers(0, 9)))
def test_on_all_ranks(xs):
    meet()
    assert len(xs) < 3


@given(data=st.data())
def test_draws_in_its_body(data, rank):
    first = data.draw(st.integers(0, 1000))
    assert rank == 0 or first < 50


@example(x=77)
@given(x=st.integers(0, 9))
def test_explicit(x, rank):
    meet()
    assert rank == 0 or x < 77


@given(x=st.integers().map(lambda x: x // (x < 11 or own_rank() == 0)))
def test_in_a_strategy(x):
    pass


def test_in_the_body(rank):
    for limit in (10, 5):

        @given(x=st.integers(0, 9))
        def check(x):
            meet()
            assert rank == 0 or x < limit

        check()


@given(data=st.data())
def test_draws_what_the_rank_says(data, rank):
    data.draw(st.integers(5, 9) if rank == 0 else st.binary(min_size=2))


@given(x=st.integers(0, 9))
def test_skips_on_one_rank(x, rank):
    if rank == 1 and x == 3:
        pytest.skip("not here")


@given(x=st.integers(0, 9))
def test_skips_on_all_ranks(x):
    if x == 3:
        pytest.skip("nowhere")


@settings(deadline=1, max_examples=20)
@given(x=st.integers())
def test_passes(x, rank):
    target(float(x % 100) * (rank + 1))
    meet()
    assume(x % 7)
    note("passes", x)


@seed(3)
@given(x=st.integers())
def test_seed(x):
    note("seed", x)


@settings(derandomize=True)
@given(x=st.integers())
def test_derandomized(x):
    note("derandomized", x)


@pytest.mark.distributed(1, kind="cpu")
@given(x=st.integers())
def test_shrinks_on_one_rank(x):
    assert x < 100
""",
    )
    run = suite.run()
    failed = ("on_one_rank", "on_all_ranks", "draws_in_its_body", "explicit", "in_a_strategy", "in_the_body")
    different = ("draws_what_the_rank_says", "skips_on_one_rank")
    passed = ("passes", "seed", "derandomized")
    assert run.outcomes() == {
        **{f"test_{name}": "FAILED" for name in (*failed, *different, "shrinks_on_one_rank")},
        **{f"test_{name}": "PASSED" for name in passed},
        "test_skips_on_all_ranks": "SKIPPED",
    }
    for name in failed:
        text = run.failure(f"test_{name}")
        assert len(re.findall("Failing (?:test case|explicit example)", text)) == (name != "in_a_strategy")
        assert "rank 0: stopped because an example failed on another rank" in text or name == "on_all_ranks"
        assert "Ranks do not shrink. @reproduce_failure(" in text or name == "explicit"
    assert "ranks 0-1: failed at test_examples.py" in run.failure("test_on_all_ranks")
    assert re.search(r"Draw 1: \d+", run.failure("test_draws_in_its_body"))
    assert "x=77," in run.failure("test_explicit")
    assert "x=100," in run.failure("test_shrinks_on_one_rank")
    text = run.failure("test_draws_what_the_rank_says")
    assert "ExamplesDiffer: rank 0 drew (5,), then " in text
    text = run.failure("test_skips_on_one_rank")
    assert "rank 1 skipped the test: what a test draws, rejects or skips must not" in text
    assert run.text.count("HypothesisWarning: distributed tests do without deadline") == 1
    for name in passed:
        assert len(suite.read(f"{name}.0")) == (20 if name == "passes" else 50)
        assert suite.read(f"{name}.0") == suite.read(f"{name}.1")
    # The line of the failure runs its example again, on all ranks.
    match = re.search(r"@reproduce_failure\(.*?\)(?= runs)", run.failure("test_on_one_rank"))
    assert match is not None
    path = suite.path / "test_examples.py"
    begin = "@given(x=st.integers())\ndef test_on_one"
    path.write_text(path.read_text().replace(begin, f"{match[0]}\n{begin}"))
    again = suite.run("-k", "test_on_one_rank").failure("test_on_one_rank")
    assert {*re.findall(r"x=\d+", again)} == {*re.findall(r"x=\d+", run.failure("test_on_one_rank"))}
    assert "rank 0: stopped because an example failed on another rank" in again


@pytest.mark.long
def test_ranks_that_leave_an_example_before_a_collective_fail_soon(suite: Suite) -> None:
    _write(
        suite,
        """
@given(x=st.integers())
def test_fails_before_a_collective(x, rank):
    assert rank == 0 or x < 100
    meet()


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


class TestMachine(Machine.TestCase):
    pass


def test_machine_in_the_body():
    run_state_machine_as_test(Machine)


@given(x=st.integers(0, 9))
def test_rejects_before_a_collective(x, rank):
    assume(rank == 0 or x != 3)
    meet()


def test_afterwards():
    meet()
""",
    )
    run = suite.run()
    failed = (
        "test_fails_before_a_collective",
        "runTest",
        "test_machine_in_the_body",
        "test_rejects_before_a_collective",
    )
    assert run.outcomes() == {**dict.fromkeys(failed, "FAILED"), "test_afterwards": "PASSED"}
    place = r"rank 0: still running at test_examples.py:\d+ in meet when it was stopped 3 s after rank 1 failed"
    for name in failed:
        assert re.search(place, run.failure(name if name != "runTest" else "TestMachine.runTest"))
    assert "state.add(x=" in run.failure("test_machine_in_the_body")
    assert "rank 1 rejected an example that other ranks still run after 10 s" in run.failure(failed[-1])


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
        assert "Ranks do not shrink" in run.failure(name)


@pytest.mark.long
def test_with_an_unknown_release_the_ranks_draw_by_themselves_and_a_warning_says_so(suite: Suite) -> None:
    _write(suite, "def test_without_examples():\n    meet()\n")
    suite.write("conftest.py", "import hypothesis.core\n\ndel hypothesis.core.StateForActualGivenExecution\n")
    run = suite.run()
    assert run.outcomes() == {"test_without_examples": "PASSED"}
    assert "pytest-accel does not know this release of Hypothesis: each rank draws its own examples" in run.text
