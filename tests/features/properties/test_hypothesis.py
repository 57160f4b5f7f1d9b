"""Tests of Hypothesis on several ranks: all run the same examples, and a failure names its example."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hypothesis") is None, reason="needs hypothesis")

_HEADER = """
import os

import pytest
from hypothesis import assume, example, given, reproduce_failure, seed, settings, target
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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
@given(x=st.integers(), fixed=st.just("é"))
def test_on_one_rank(x, fixed, rank):
    note("on_one_rank", x)
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


def test_in_the_body(rank):
    for limit in (10, 5):

        @settings(max_examples=20)
        @given(x=st.integers(0, 9))
        def check(x):
            meet()
            assert rank == 0 or x < limit

        check()


class Machine(RuleBasedStateMachine):
    total = 0

    @rule(x=st.integers(0, 3))
    def add(self, x):
        meet()
        self.total += x

    @invariant()
    def is_small(self):
        assert own_rank() == 0 or self.total <= 3


class TestMachine(Machine.TestCase):
    pass


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


@pytest.mark.distributed(1, kind="cpu")
@given(x=st.integers())
def test_shrinks_on_one_rank(x):
    assert x < 100
""",
    )
    run = suite.run()
    notes = {
        "test_on_one_rank": r"@example\(x=\d+, fixed='é'\)",
        "test_on_all_ranks": r"@example\(xs=\[.*?\]\)",
        "test_draws_in_its_body": r"@reproduce_failure\(.*?\)",
        "test_explicit": r"@example\(x=77\)",
        "test_in_the_body": r"@example\(x=\d\)",
        "TestMachine.runTest": r"@reproduce_failure\(.*?\)",
    }
    passed = ("passes", "seed")
    assert run.outcomes() == {
        **{name.rpartition(".")[2]: "FAILED" for name in (*notes, "test_shrinks_on_one_rank")},
        **{f"test_{name}": "PASSED" for name in passed},
    }
    lines: dict[str, str] = {}
    for name, pattern in notes.items():
        text = run.failure(name)
        match = re.search(f"Ranks do not shrink. ({pattern}) above the test runs this example again", text)
        assert match is not None
        lines[name] = match[1]
        assert "rank 1: failed" in text or "ranks 0-1: failed" in text
    assert re.search(r"(Failing test case|Falsifying example): test_on_one_rank\(", run.failure("test_on_one_rank"))
    assert re.search(r"Draw 1: \d+", run.failure("test_draws_in_its_body"))
    assert "state.add(x=" in run.failure("TestMachine.runTest")
    assert "x=100," in run.failure("test_shrinks_on_one_rank")
    assert run.text.count("PytestWarning: distributed tests do without deadline") == 1
    for name in passed:
        assert len(suite.read(f"{name}.0")) == (20 if name == "passes" else 50)
        assert suite.read(f"{name}.0") == suite.read(f"{name}.1")
    # The rank does not repeat the example that has failed: the others would not take part in its collectives.
    assert sum(int(x) >= 100 for x in suite.read("on_one_rank.1")) == 1
    # The line of a failure runs its example again, on all ranks.
    path = suite.path / "test_examples.py"
    text = path.read_text()
    for name in ("test_on_one_rank", "test_draws_in_its_body"):
        text = re.sub(rf"@given(?=.*\ndef {name}\()", f"{lines[name]}\n@given".replace("\\", r"\\"), text)
    path.write_text(text)
    again = suite.run("-k", "on_one_rank or draws_in_its_body")
    assert set(again.outcomes().values()) == {"FAILED"}
    for name, number in (("test_on_one_rank", r"x=-?\d+"), ("test_draws_in_its_body", r"Draw 1: \d+")):
        assert {*re.findall(number, again.failure(name))} == {*re.findall(number, run.failure(name))}


@pytest.mark.long
def test_with_an_unknown_release_the_ranks_draw_by_themselves_and_a_warning_says_so(suite: Suite) -> None:
    _write(suite, "def test_without_examples():\n    meet()\n")
    suite.write("conftest.py", "import hypothesis.core\n\ndel hypothesis.core.failure_exceptions_to_catch\n")
    run = suite.run()
    assert run.outcomes() == {"test_without_examples": "PASSED"}
    assert "pytest-accel does not know this release of Hypothesis: each rank draws its own examples" in run.text
