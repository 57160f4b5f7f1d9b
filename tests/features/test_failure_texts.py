"""Tests of the reports of frequent mistakes, which name the cause and what to do, and of very long failures."""

from __future__ import annotations

import re

import pytest

from tests.features.conftest import Suite
from tests.run import Run


def _summary(run: Run, test: str) -> str:
    """Return the text about `test` in pytest's short summary, without the test's id."""
    found = re.search(rf"^(?:FAILED|ERROR) \S+::{re.escape(test)} - (.*)$", run.text, re.MULTILINE)
    assert found is not None, f"no line about {test} in the short summary of\n{run.text}"
    return found[1]


_MISTAKES = """
    import logging

    import pytest
    import torch
    import torch.distributed as dist

    both = pytest.mark.distributed(2, kind="cpu")


    @both
    def test_second_group():
        logging.getLogger("mine").warning("own record")
        dist.init_process_group("gloo")


    @both
    def test_argument():
        pass_on(dist.all_reduce)


    def pass_on(function):
        function("no tensor")


    @torch.no_grad()
    def without_gradients():
        raise ValueError("in the helper")


    @both
    def test_decorated_helper():
        without_gradients()


    @pytest.mark.devices(1)
    def test_process_of_its_own():
        dist.get_world_size()


    def test_unmarked():
        dist.get_world_size()


    def make_group():
        dist.init_process_group("gloo")


    @pytest.fixture
    def group():
        make_group()


    def test_unmarked_init():
        make_group()


    def test_unmarked_fixture(group):
        pass


    def test_unmarked_argument():
        dist.all_reduce("no tensor")
    """


def _check_mistakes_with_process_groups(run: Run) -> None:
    """Check that the mistakes of `_MISTAKES` are explained."""
    second = run.failure("test_second_group")
    assert second.startswith(
        """ranks 0-1 of 2 on cpu

    @both
    def test_second_group():
        logging.getLogger("mine").warning("own record")
>       dist.init_process_group("gloo")
E       ValueError: trying to initialize the default process group twice!
E       the default group exists already: leave this call out, or use @pytest.mark.distributed(init=False)

test_groups.py:"""
    )
    assert _summary(run, "test_second_group").startswith("ranks 0-1: ValueError: trying to initialize")
    assert "own record" in second
    assert "c10d" not in second

    argument = run.failure("test_argument")
    # A frame of a library takes one line, as its code is of no help; the deepest one of the suite is shown in full.
    assert re.search(
        r"^>       pass_on\(dist\.all_reduce\)\n\ntest_groups\.py:\d+: \n[_ ]+\n"
        r"\nfunction = .*\n\n    def pass_on\(function\):\n>       function\(.no tensor.\)\n"
        r"\ntest_groups\.py:\d+: \n[_ ]+\n"
        r"\S+distributed_c10d\.py:\d+: in all_reduce\n    .*\n"
        r"\S+distributed_c10d\.py:\d+: in _check_single_tensor\n    .*\nE   TypeError: Invalid function argument",
        argument,
        re.MULTILINE,
    ), argument
    assert "c10d_logger" not in argument
    assert "c10d-NullHandler" not in argument
    assert "_contextlib.py" not in run.failure("test_decorated_helper")
    assert "in the helper" in run.failure("test_decorated_helper")
    assert "traceback entries are hidden" not in f"{second}{argument}{run.failure('test_decorated_helper')}"

    hint = re.compile(r"^E +this test has no @pytest.mark.distributed, so it ran in one process$", re.MULTILINE)
    for test in ("test_process_of_its_own", "test_unmarked", "test_unmarked_init", "test_unmarked_fixture"):
        assert len(hint.findall(run.failure(test))) == 1
        assert "/torch/" not in run.failure(test).partition("Captured log")[0]
    assert ">       dist.init_process_group(" in run.failure("test_unmarked_init")
    assert ">       dist.init_process_group(" in run.failure("test_unmarked_fixture")
    # A failure without a known mistake keeps all frames.
    assert "c10d_logger.py" in run.failure("test_unmarked_argument")


def test_texts_of_frequent_mistakes(suite: Suite) -> None:
    """Process groups, an object that cannot be pickled, a backend, a missing fixture, and a failing import."""
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(2, kind="cpu")
        def test_gather(gather):
            gather(lambda: 0)


        @pytest.mark.distributed(2, backend="nccl", kind="cpu")
        def test_backend():
            pass


        @pytest.mark.distributed(2, kind="cpu")
        def test_fixture(modle):
            pass


        @pytest.mark.devices(1)
        def test_one_process(modle):
            pass


        @pytest.fixture(scope="module")
        def wide(shared_tmp_path):
            pass


        @pytest.mark.distributed(2, kind="cpu")
        def test_scopes(wide):
            pass
        """,
    )
    source = """
        import os
        import pytest

        if os.environ.get("RANK") in {ranks}:
            {fails}

        @pytest.mark.distributed(2, kind="cpu")
        def {test}():
            pass
        """
    suite.write("test_missing.py", source.format(ranks=["0", "1"], fails="import not_there", test="test_m"))
    suite.write("test_broken.py", source.format(ranks=["1"], fails="raise KeyError('x')", test="test_b"))
    suite.write("test_groups.py", _MISTAKES)
    run = suite.run()

    assert run.count() == {"FAILED": 8, "ERROR": 7}, run.text
    _check_mistakes_with_process_groups(run)
    assert _summary(run, "test_gather").startswith("ranks 0-1: TypeError: gather() needs picklable objects: <lambda> (")
    assert ">       gather(lambda: 0)\nE       TypeError" in run.failure("test_gather")
    text = (
        'backend="nccl" needs CUDA devices, but ranks run on the CPU here; '
        'drop backend=, or add @pytest.mark.devices(kind="cuda")'
    )
    shown, _, rerun = run.failure("test_backend").splitlines()
    assert (shown, rerun.startswith("pytest test_it.py::test_backend ")) == (text, True)
    assert _summary(run, "test_backend").startswith("backend")
    assert _summary(run, "test_fixture") == "ranks 0-1: fixture 'modle' not found"
    assert _summary(run, "test_one_process") == "fixture 'modle' not found"
    assert "ranks 0-1: failed\n" in run.failure("test_fixture")
    assert ">       available fixtures: " in run.failure("test_fixture")
    assert "ranks 0-1: failed at test_it.py:25\n" in run.failure("test_scopes")
    why = "ModuleNotFoundError: No module named 'not_there'"
    assert _summary(run, "test_m") == f"test_missing.py cannot be imported in the ranks: {why}"
    assert f"E   {why}" in run.failure("test_m")
    assert "of 2 on" not in run.failure("test_m")
    assert _summary(run, "test_b") == "rank 1: test_broken.py cannot be imported in the ranks: KeyError: 'x'"
    assert "rank 1: could not run the test\nrank 0: could run the test\n" in run.failure("test_b")


@pytest.mark.long
def test_all_frames_are_shown_with_full_trace(suite: Suite) -> None:
    suite.write("test_it.py", _MISTAKES)
    run = suite.run("--full-trace", "-k", "second_group or decorated_helper or argument")
    assert "def all_reduce(" in run.failure("test_argument")
    assert "c10d_logger.py" in run.failure("test_second_group")
    assert "Initialize the default distributed process group" in run.failure("test_second_group")
    assert "_contextlib.py" in run.failure("test_decorated_helper")


def test_texts_of_mistakes_in_a_project(suite: Suite) -> None:
    suite.write("fails.py", "raise SystemExit(3)")
    suite.write(
        "test_it.py",
        """
        import pytest

        import pytest_accel


        @pytest.mark.devices(1)
        @pytest.mark.parametrize("expected", [False, True])
        def test_launch(launch, request, expected):
            if expected:
                request.applymarker(pytest.mark.xfail(raises=pytest_accel.LaunchError))
            launch("fails.py", launcher="python")


        @pytest.mark.distributed(2, init=False)
        def test_fails(rank):
            assert rank == 2


        def test_in_a_hook():
            pass
        """,
    )
    suite.write(
        "conftest.py",
        """
        def pytest_runtest_teardown(item):
            assert item.name != "test_in_a_hook"
        """,
    )
    suite.write(
        "test_reads.py",
        """
        import os

        WORLD_SIZE = int(os.environ["WORLD_SIZE"])
        """,
    )
    suite.without_torch()
    run = suite.run("--strict-markers", "--continue-on-collection-errors")

    assert run.outcomes() == {
        "test_launch[False]": "FAILED",
        "test_launch[True]": "XFAIL",
        "test_fails": "FAILED",
        "test_in_a_hook": "PASSED ERROR",
    }
    assert _summary(run, "test_launch[False]").startswith("pytest_accel.LaunchError: python ended with exit status 3")
    assert "--strict-markers" in run.text
    assert "strict_markers=" not in run.text
    assert "pytest_accel" not in run.failure("test_in_a_hook")  # No frames of the plugin.
    assert "WORLD_SIZE is set in the ranks of a test with @pytest.mark.distributed" in run.text


def test_an_error_of_a_conftest_in_ranks_is_shown_once(suite: Suite) -> None:
    suite.write(
        "conftest.py",
        """
        from pytest_accel.rank.context import RANK


        def pytest_configure(config):
            if RANK in config.stash:
                raise RuntimeError("not in a rank")
        """,
    )
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(2, init=False)
        def test_it():
            pass
        """,
    )
    suite.without_torch()
    run = suite.run()

    assert _summary(run, "test_it").endswith("ranks 0-1 could not run the test: RuntimeError: not in a rank")
    assert len(re.findall("^.*RuntimeError: not in a rank", run.failure("test_it"), re.MULTILINE)) == 1


@pytest.fixture
def long_failures(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Provide a suite whose failures contain thousands of numbers."""
    suite.without_torch()
    monkeypatch.setenv("CI", "true")  # Keeps pytest itself from truncating.
    suite.write(
        "test_it.py",
        """
        import pytest

        pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)


        def test_lists(rank):
            zeros = [0.0] * 1000
            ones = list(zeros)
            ones[77] = 1.0
            assert ones == zeros


        def test_message(rank):
            raise ValueError(str(list(range(9000 + rank))))


        def test_output(rank):
            for line in range(9000):
                print(f"line {line} of rank {rank}")
            assert False
        """,
    )
    return suite


def test_long_failures_are_truncated(long_failures: Suite) -> None:
    run = long_failures.run("--junitxml=report.xml")
    assert run.count() == {"FAILED": 3}
    lists, message = run.failure("test_lists"), run.failure("test_message")
    assert "ranks 0-1: failed at test_it.py:11\n" in lists
    assert "At index 77 diff: 1.0 != 0.0" in lists
    assert "lines left out; -vv shows them" in lists
    assert len(lists.splitlines()) < 200
    assert "characters left out; -vv shows them" in message
    assert "8997, 8998, 8999" in message
    assert len(message) < 5_000
    output = run.failure("test_output")
    assert "line 0 of rank 0" in output
    assert "line 8999 of rank 1" in output
    assert output.count("characters left out; -vv shows them") == 2
    assert len(output) < 110_000
    assert (long_failures.path / "report.xml").stat().st_size < 240_000


@pytest.mark.long
def test_long_failures_are_complete_on_request(long_failures: Suite) -> None:
    run = long_failures.run("-vv", "-k", "message or output")
    assert "left out" not in run.text
    assert "4498, 4499, 4500, 4501" in run.failure("test_message")
    assert "line 4500 of rank 0" in run.failure("test_output")
