"""Tests of leaks: what a test leaves changed or running in its ranks is reported as configured, and stays if it can."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite
from tests.run import CAUSES

_SETTINGS_TESTS = """
    import os

    import pytest

    pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)
    STARTED = os.getpid(), os.getcwd()


    def test_leaves_on_both():
        os.environ["LEFT"] = "1"
        os.umask(0)


    def test_leaves_on_one(rank):
        if rank == 1:
            os.chdir("/")


    def test_finds_all_put_back():
        assert (os.getpid(), os.getcwd()) == STARTED
        assert "LEFT" not in os.environ
"""


@pytest.mark.long(except_for="warn")
@pytest.mark.parametrize(
    ("options", "counts", "warnings"),
    [
        pytest.param(("-W", "default"), {"PASSED": 3}, 3, id="warn"),
        pytest.param(("-W", "default", "-o", "accel_leaks=off"), {"PASSED": 2, "FAILED": 1}, 0, id="off"),
        pytest.param(("-W", "error"), {"PASSED": 3, "ERROR": 2}, 0, id="error"),
        pytest.param(("-W", "error", "-W", "ignore::pytest_accel.LeftoverWarning"), {"PASSED": 3}, 0, id="ignore"),
    ],
)
def test_changed_settings_are_put_back_and_reported_as_configured(
    suite: Suite, options: tuple[str, ...], counts: dict[str, int], warnings: int
) -> None:
    """`tests/faults/test_spoiled_processes.py` has all settings."""
    suite.without_torch()
    suite.write("test_leaves.py", _SETTINGS_TESTS)
    run = suite.run(*options)
    assert run.count() == counts, run.text
    assert run.text.count("LeftoverWarning: ") == warnings


@pytest.mark.long
def test_changes_that_a_test_has_not_made_are_no_leak(suite: Suite) -> None:
    """A wider fixture has made them, or undoes them. Each case has a world of its own size."""
    suite.write(
        "test_wider.py",
        """
        import os
        import signal

        import pytest

        pytestmark = pytest.mark.distributed(2, kind="cpu")
        signal.alarm(1000)


        @pytest.fixture(scope="module", autouse=True)
        def doubles(tmp_path_factory):
            global torch
            import torch

            before = os.getcwd()
            torch.set_default_dtype(torch.float64)
            os.chdir(tmp_path_factory.mktemp("here"))
            yield
            torch.set_default_dtype(torch.float32)
            os.chdir(before)


        @pytest.mark.parametrize("number", range(2))
        def test_counts_in_doubles(number, monkeypatch):
            monkeypatch.chdir("/")
            assert torch.ones(1).dtype == torch.float64
            signal.alarm(0)  # As if the timer of the module had expired.
        """,
    )
    # A change is a leak again when the fixture that made it has ended.
    suite.write(
        "test_a.py",
        """
        import pytest
        from tests.lazy_torch import torch


        @pytest.fixture(scope="module", autouse=True)
        def doubles():
            torch.set_default_dtype(torch.float64)
            yield
            torch.set_default_dtype(torch.float32)


        @pytest.mark.distributed(3, kind="cpu", init=False)
        def test_in_doubles():
            assert torch.get_default_dtype() == torch.float64
        """,
    )
    suite.write(
        "test_b.py",
        """
        import pytest
        from tests.lazy_torch import torch

        pytestmark = pytest.mark.distributed(3, kind="cpu", init=False)


        def test_leaves_doubles():
            torch.set_default_dtype(torch.float64)


        def test_after():
            assert torch.get_default_dtype() == torch.float32
        """,
    )
    run = suite.run("-o", "accel_leaks=fail", CAUSES)
    leaks = {"test_leaves_doubles": "PASSED ERROR leaked: setting; ranks 0-2"}
    run.expect(dict.fromkeys(run.outcomes(), "PASSED") | leaks)
    assert len(run.outcomes()) == 5
