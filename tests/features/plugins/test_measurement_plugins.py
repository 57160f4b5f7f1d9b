"""Tests of pytest-memray: each rank judges its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_MEMORY = """
    import pytest

    def test_plain():
        assert bytearray(3 * 10**6)

    @pytest.mark.distributed(2)
    @pytest.mark.limit_memory("3 MB")
    def test_one_rank_has_too_much(rank):
        assert bytearray((1 + 3 * rank) * 10**6)

    @pytest.mark.distributed(2)
    @pytest.mark.limit_memory("9 MB")
    def test_within():
        assert bytearray(5 * 10**6)
    """


@needs("pytest_memray")
def test_each_rank_judges_its_limits_and_the_report_has_unmarked_tests(suite: Suite) -> None:
    suite.plugin("memray")
    suite.write("test_x.py", _MEMORY)
    run = suite.run("--memray", "--memray-bin-path=bins", "--memray-bin-prefix=of")
    assert run.outcomes() == {"test_plain": "PASSED", "test_within": "PASSED"}
    failure = run.failure("test_one_rank_has_too_much")
    assert "rank 1: failed" in failure
    assert "Test was limited to 3.0MiB but allocated 3.8MiB" in run.text
    assert "Allocation results for test_x.py::test_plain" in run.text
    assert "Allocation results for test_x.py::test_within" not in run.text
    assert sorted(path.name for path in (suite.path / "bins").glob("*.bin")) == ["of-test_x.py-test_plain.bin"]
    refused = suite.run("--memray", "--fail-on-increase")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert "--fail-on-increase: each rank would compare with the peak of another one" in refused.text + refused.errors
