"""Tests of sessions whose tests tamper with them: with the clock, reports, streams, or file descriptors."""

from __future__ import annotations

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES


@pytest.mark.long
def test_reports_are_correct_when_a_test_manipulates_its_session(suite: BackgroundSuite) -> None:
    suite.write(
        "conftest.py",
        """
        import os

        import pytest

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            report.item = item
            if report.when == "call" and "a_phase_of_a_plugin" in item.name:
                fails = "fails" in item.name and os.environ.get("RANK") == "1"
                outcome, text = ("failed", "the cleanup fails") if fails else ("passed", None)
                more = pytest.TestReport(item.nodeid, item.location, {}, outcome, text, "cleanup")
                item.ihook.pytest_runtest_logreport(report=more)
            return report
        """,
    )
    suite.write(
        "test_deceives.py",
        """
        import time

        import pytest
        import torch
        from freezegun import freeze_time
        from tests.inner import hang_here

        pytestmark = pytest.mark.distributed(2)
        sleep = time.sleep


        @pytest.fixture
        def stopped():
            with freeze_time("2030-01-01"):
                yield


        @pytest.fixture
        def slow():
            sleep(0.5)


        def test_stops_the_clock(stopped):
            pass


        @pytest.mark.distributed(1)
        def test_in_another_world():
            pass


        def test_fails_in_the_first_world(slow):
            assert 1 == 2


        def test_hangs_while_the_clock_stands(stopped, rank):
            if rank == 1:
                hang_here()
                sleep(1000)


        @pytest.mark.parametrize("value", [torch.ones(2), lambda: 1, [1, {"two": None}]], ids="tlj")
        def test_records(record_property, value):
            record_property("value", value)


        def test_has_a_phase_of_a_plugin():
            pass


        def test_fails_in_a_phase_of_a_plugin():
            pass
        """,
    )
    options = (CAUSES, "-p", "tests.late_driver", "-o", "junit_family=xunit1")
    run = suite.run(*options)  # The default family refuses record_property.
    assert run.causes["test_hangs_while_the_clock_stands"] == "hung: phase timeout; rank 1"
    assert "the cleanup fails" in run.failure("test_fails_in_a_phase_of_a_plugin")
    assert "assert 1 == 2" in run.failure("test_fails_in_the_first_world")  # Its report cannot be sent whole.
    assert run.outcomes() == {
        "test_stops_the_clock": "PASSED",
        "test_in_another_world": "PASSED",
        "test_fails_in_the_first_world": "FAILED",
        "test_hangs_while_the_clock_stands": "FAILED",
        **{f"test_records[{name}]": "PASSED" for name in "tlj"},
        # The first outcome is that of the phase in the driver, where it passes.
        "test_has_a_phase_of_a_plugin": "PASSED PASSED",
        "test_fails_in_a_phase_of_a_plugin": "PASSED FAILED FAILED",
    }, run.text
