"""Tests of what one test must not do to the next one of the same world."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.background_suite import BackgroundSuite

pytestmark = pytest.mark.usefixtures("without_torch")

CONFTEST = """
    import os
    from pathlib import Path

    import pytest

    @pytest.fixture(autouse=True)
    def noted(request):
        rank = os.environ.get("RANK")
        if rank is not None:
            with Path(__file__).with_name("begun").open("a") as file:
                file.write(f"{request.node.name} {rank}\\n")
"""


@pytest.fixture
def recording_suite(suite: BackgroundSuite) -> BackgroundSuite:
    """Provide a suite whose tests write the names and ranks of started tests to the file ``begun``."""
    suite.write("conftest.py", CONFTEST)
    return suite


def start_counts(suite: BackgroundSuite) -> Counter[str]:
    """Return how often each test was started on each rank."""
    return Counter((suite.path / "begun").read_text().splitlines())


@pytest.mark.long
def test_no_rank_starts_a_test_after_the_first_failure(recording_suite: BackgroundSuite) -> None:
    """A worker of xdist has received the next test when the first one fails."""
    recording_suite.write(
        "test_it.py",
        """
        import pytest

        pytestmark = pytest.mark.distributed(2, init=False)


        def test_passes():
            pass


        def test_fails(rank):
            assert rank == 0


        def test_never():
            pass
        """,
    )
    run = recording_suite.run("-x", "-n1")
    assert "1 failed, 1 passed" in run.text
    assert start_counts(recording_suite) == {
        f"test_{name} {rank}": 1 for name in ("passes", "fails") for rank in (0, 1)
    }


def test_ranks_wait_for_hooks_of_the_driver_and_not_for_phases_of_other_ranks(suite: BackgroundSuite) -> None:
    """The hooks remove files between tests, and take their time, as they may under pytest alone."""
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
        import os
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
            clean(report.nodeid)


        pytest_runtest_logstart = pytest_runtest_logfinish = clean
        pytest_runtest_call = pytest.hookimpl(trylast=True)(lambda item: clean(item.nodeid))
        pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call
        """,
    )
    suite.write(
        "test_it.py",
        """
        import os
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
