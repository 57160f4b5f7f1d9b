"""Tests of what may differ between the collection in the driver and the one in ranks: its time, files and devices."""

from __future__ import annotations

import pytest

from tests.deadline import scaled
from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")


def test_the_import_of_a_file_has_no_part_in_the_limits_of_its_tests(suite: Suite) -> None:
    suite.plugin("pytest_timeout")
    suite.write(
        "conftest.py",
        """
        from tests.inner import note


        def pytest_runtest_logreport(report):
            note("durations.log", report.duration)
        """,
    )
    suite.write(
        "test_slow_import.py",
        """
        import os
        import time

        import pytest

        if os.environ.get("RANK") == "1":
            time.sleep(4.5)


        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_fails(rank):
            assert rank == 1


        @pytest.mark.distributed(2, kind="cpu", init=False, fresh=True, timeout=4)
        def test_with_a_limit():
            pass


        @pytest.mark.timeout(4)
        @pytest.mark.distributed(2, kind="cpu", init=False, fresh=True)
        def test_with_a_limit_of_a_plugin():
            pass
        """,
    )
    run = suite.run()
    run.expect({"test_fails": "FAILED", "test_with_a_limit": "PASSED", "test_with_a_limit_of_a_plugin": "PASSED"})
    assert "rank 0: failed at test_slow_import.py:13\nrank 1: passed\n" in run.failure("test_fails")
    assert max(map(float, suite.read("durations.log"))) < 4


def test_an_import_that_does_not_end_has_a_limit_of_its_own(suite: Suite) -> None:
    limit = round(scaled(4))  # In this time, ranks on a busy machine begin the import, too.
    suite.write(
        "conftest.py",
        f"""
        from pytest_accel.driver import world

        world.COLLECTION_TIMEOUT = {limit}

        def pytest_runtest_logfinish(nodeid):
            if nodeid.endswith("of_the_same_file"):
                world.COLLECTION_TIMEOUT = 600
        """,
    )
    suite.write(
        "test_it.py",
        """
        import os
        import threading

        import pytest

        if "RANK" in os.environ:
            threading.Event().wait()


        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_it():
            pass


        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_of_the_same_file():
            pass
        """,
    )
    text = "import pytest\n\n\n@pytest.mark.distributed(2, kind='cpu', init=False)\ndef test_next():\n    pass\n"
    suite.write("test_next.py", text)
    run = suite.run()
    run.expect({"test_it": "ERROR", "test_of_the_same_file": "ERROR", "test_next": "PASSED"})
    why = "ranks did not import and collect the file in time for an earlier test"
    assert why in run.failure("test_of_the_same_file")
    where = f"ranks 0-1: did not import and collect the test's file within {limit} s at test_it.py:8"
    assert where in run.failure("test_it")


def test_a_file_that_has_changed_since_its_collection_is_an_error_of_its_tests(suite: Suite) -> None:
    suite.write(
        "test_1.py",
        """
        import os

        import pytest
        from tests.inner import note


        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_edits(rank):
            if rank == 0:
                note("test_2.py", "''")
                os.utime("test_4.py", (0, 0))
        """,
    )
    text = "import pytest\n\n\n@pytest.mark.distributed(2, kind='cpu', init=False)\ndef test_{}():\n    pass\n"
    suite.write("test_2.py", text.format("edited") + text.format("edited_too").partition("\n\n\n")[2])
    suite.write("test_4.py", text.format("touched"))
    run = suite.run()
    run.expect(
        {
            "test_edits": "PASSED",
            "test_edited": "ERROR",
            "test_edited_too": "ERROR",
            "test_touched": "PASSED",
        }
    )
    changed = "has changed since the session collected its tests; run the session again"
    assert f"ranks 0-1 could not run the test: test_2.py {changed}" in run.failure("test_edited")
    assert f"ranks 0-1 could not run the test: test_2.py {changed}" in run.failure("test_edited_too")


def test_reports_name_the_devices_that_a_rank_does_not_see(suite: Suite) -> None:
    """A rank that lacks a test is not replaced, and each report lists what it has collected."""
    suite.write(
        "test_it.py",
        """
        import os

        import pytest
        from tests.inner import note

        COUNT = len(os.environ.get("SIM_VISIBLE_DEVICES", "0,1,2,3").split(","))


        @pytest.mark.devices(1)
        def test_before():
            note("pids.log", os.getpid())


        @pytest.mark.devices(1)
        @pytest.mark.parametrize("number", range(COUNT))
        def test_number(number):
            pass


        @pytest.mark.devices(1)
        def test_after():
            note("pids.log", os.getpid())


        @pytest.mark.devices(2)
        @pytest.mark.skipif(COUNT < 4, reason="needs 4 devices")
        def test_skipped():
            pass
        """,
    )
    run = suite.run("-rs")
    run.expect(
        {
            "test_before": "PASSED",
            **{f"test_number[{number}]": "ERROR" for number in range(4)},
            "test_after": "PASSED",
            "test_skipped": "SKIPPED",
        }
    )
    for number in range(4):
        assert (
            "this rank has collected 1 of test_number, and the driver 4; it has test_number[0]. The parameters of a "
            "test must be the same in every process (this rank sees 1 of the session's 4 devices)"
        ) in run.failure(f"test_number[{number}]")
    assert len(set(suite.read("pids.log"))) == 1
    assert "needs 4 devices (this rank sees 2 of the session's 4 devices)" in run.text
