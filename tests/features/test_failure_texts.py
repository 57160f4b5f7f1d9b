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
