"""The texts of frequent mistakes: each names its cause in the headline, and where possible what to do about it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.features.conftest import Run, Suite


def _summary(run: Run, test: str) -> str:
    """Return the line of pytest's short summary about `test`, without the test's name."""
    found = re.search(rf"^(?:FAILED|ERROR) \S+::{re.escape(test)} - (.*)$", run.text, re.MULTILINE)
    assert found is not None, f"no line about {test} in the short summary of\n{run.text}"
    return found[1]


def test_gather_names_an_object_that_cannot_be_pickled(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.distributed(2)
        def test_it(gather):
            gather(lambda: 0)
        """,
    )
    run = suite.run()
    assert _summary(run, "test_it").startswith("ranks 0-1: TypeError: gather() needs picklable objects: <lambda> (")
    assert ">       gather(lambda: 0)\nE       TypeError" in run.failure("test_it")


def test_a_backend_that_needs_devices_is_refused_in_one_line(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.distributed(2, backend="nccl")
        def test_it():
            pass
        """,
    )
    run = suite.run()
    text = (
        'backend="nccl" needs CUDA devices, but ranks run on the CPU here; '
        'drop backend=, or add @pytest.mark.devices(kind="cuda")'
    )
    assert run.failure("test_it") == f"{text}\n"
    assert _summary(run, "test_it").startswith("Failed: backend")


def test_a_missing_fixture_is_named(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.distributed(2)
        def test_it(modle):
            pass

        @pytest.mark.devices(1)
        def test_one_process(modle):
            pass
        """,
    )
    run = suite.run()
    assert _summary(run, "test_it") == "ranks 0-1: fixture 'modle' not found"
    assert _summary(run, "test_one_process") == "fixture 'modle' not found"
    assert "ranks 0-1: failed: fixture 'modle' not found" in run.failure("test_it")
    assert ">       available fixtures: " in run.failure("test_it")


def test_a_file_that_only_ranks_cannot_import_is_named(suite: Suite) -> None:
    source = """
        import os
        import pytest

        if os.environ.get("RANK") in {ranks}:
            {fails}

        @pytest.mark.distributed(2, device="cpu")
        def {test}():
            pass
        """
    suite.write("test_missing.py", source.format(ranks=["0", "1"], fails="import not_there", test="test_m"))
    suite.write("test_broken.py", source.format(ranks=["1"], fails="raise KeyError('x')", test="test_b"))
    run = suite.run()
    assert _summary(run, "test_m") == "test_missing.py cannot be imported in the ranks: No module named 'not_there'"
    assert "E   ModuleNotFoundError: No module named 'not_there'" in run.failure("test_m")
    assert "of 2 on" not in run.failure("test_m")
    assert _summary(run, "test_b") == "rank 1: test_broken.py cannot be imported in the ranks: KeyError: 'x'"
    assert "rank 1: test_broken.py cannot be imported in the ranks: KeyError: 'x'\n" in run.failure("test_b")
