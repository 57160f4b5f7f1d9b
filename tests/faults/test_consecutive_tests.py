"""Tests of what one test must not do to the next one of the same world."""

from __future__ import annotations

import pytest

from tests.background_suite import BackgroundSuite

pytestmark = pytest.mark.usefixtures("without_torch")


def test_ranks_wait_for_hooks_of_the_driver_and_not_for_phases_of_other_ranks(suite: BackgroundSuite) -> None:
    """The hooks before the setup and after the call remove files, and take their time."""
    suite.write(
        "conftest.py",
        """
        import os

        pytest_plugins = [] if "WORLD_SIZE" in os.environ else ["cleaning_hooks"]
        """,
    )
    suite.write(
        "cleaning_hooks.py",
        """
        import time
        from pathlib import Path

        import pytest

        OUTPUTS = Path(__file__).with_name("outputs")


        def clean(nodeid):
            for _ in range(3):
                for path in OUTPUTS.glob(nodeid.partition("::")[0] + ".*"):
                    path.unlink(missing_ok=True)
                time.sleep(0.01)


        def pytest_runtest_logreport(report):
            if report.when == "teardown":
                clean(report.nodeid)


        pytest_runtest_logstart = pytest_runtest_logfinish = clean
        pytest_runtest_setup = pytest.hookimpl(tryfirst=True)(lambda item: clean(item.nodeid))
        pytest_runtest_teardown = pytest.hookimpl(trylast=True)(lambda item: clean(item.nodeid))
        """,
    )
    suite.write(
        "test_it.py",
        """
        import time
        from pathlib import Path

        import pytest

        OUTPUTS = Path(__file__).with_name("outputs")


        @pytest.mark.distributed(2, init=False)
        @pytest.mark.parametrize("number", range(8))
        def test_writes(number, rank):
            path = OUTPUTS / f"{Path(__file__).name}.{number}.{rank}"
            path.write_text(str(number))
            deadline = time.monotonic() + 0.15
            while time.monotonic() < deadline:
                assert path.read_text() == str(number)


        @pytest.fixture
        def waits_for_the_other_call(rank):
            while rank == 0 and not (OUTPUTS / "called").exists():
                time.sleep(0.01)


        @pytest.mark.distributed(2, init=False)
        def test_calls(waits_for_the_other_call):
            (OUTPUTS / "called").touch()
        """,
    )
    (suite.path / "outputs").mkdir()
    assert suite.run("--accel-timeout", "60").count() == {"PASSED": 9}
