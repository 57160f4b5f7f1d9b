"""Tests of failures with very long texts: they are truncated, and complete with `-vv`."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite


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
