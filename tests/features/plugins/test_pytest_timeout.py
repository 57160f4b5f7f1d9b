"""Tests of pytest-timeout: the driver enforces the timeouts for all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite


@needs("pytest_timeout")
def test_driver_enforces_timeouts_of_pytest_timeout(suite: Suite) -> None:
    suite.plugin("pytest_timeout")
    # On a busy machine, too, 4 seconds are enough for the setup, and for the rank that does not hang.
    suite.write(
        "test_slow.py",
        """
        import threading

        import pytest

        pytestmark = pytest.mark.distributed(2, kind="cpu")


        def test_before():
            pass


        @pytest.mark.timeout(4)
        def test_hangs(rank):
            if rank == 1:
                threading.Event().wait()


        def test_after():
            pass


        @pytest.mark.timeout(30)
        def test_in_time():
            pass


        @pytest.mark.timeout(4, method="thread")
        def test_hangs_and_the_session_goes_on(rank):
            if rank == 0:
                threading.Event().wait()


        @pytest.mark.timeout(4, func_only=True)
        def test_hangs_in_its_function(rank):
            threading.Event().wait()


        @pytest.mark.timeout(0)
        def test_has_no_limit():
            pass
        """,
    )
    run = suite.run()
    assert run.count() == {"PASSED": 4, "FAILED": 3}
    for test, subject in (
        ("test_hangs", "rank 1 is"),
        ("test_hangs_and_the_session_goes_on", "rank 0 is"),
        ("test_hangs_in_its_function", "ranks 0-1 are"),
    ):
        assert f"timed out after 4 s: {subject} at test_slow.py:" in run.failure(test)
    failure = run.failure("test_hangs")
    assert "test_slow.py:16: " in failure
