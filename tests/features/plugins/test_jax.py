"""Tests of JAX in ranks: the examples of docs/how-to/process-groups.md."""

from __future__ import annotations

import re
from pathlib import Path

from tests.features.conftest import Suite
from tests.features.plugins.conftest import needs

pytestmark = needs("jax")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "process-groups.md"


def test_examples_of_the_page_pass(suite: Suite) -> None:
    blocks = re.findall(r"^```python needs jax( conftest)?\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert [bool(conftest) for conftest, _ in blocks] == [True, False, False]
    for number, (conftest, block) in enumerate(blocks):
        suite.write("conftest.py" if conftest else f"test_page_{number}.py", block)
    run = suite.run("--accel=none")
    assert run.outcomes() == {
        "test_gather": "PASSED",
        "test_sum_over_all_devices": "PASSED",
        "test_main[1]": "PASSED",
        "test_main[2]": "PASSED",
    }
