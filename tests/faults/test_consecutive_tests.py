"""Tests of what one test must not do to the next one of the same world."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES

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
def test_every_test_runs_once_and_reports_its_own_failures(recording_suite: BackgroundSuite) -> None:
    # The ranks finish each test at different times, sometimes the one first and sometimes the other.
    recording_suite.write(
        "test_uneven.py",
        """
        import pytest

        @pytest.mark.distributed(2, init=False)
        @pytest.mark.parametrize("number", range(30))
        def test_uneven(rank, number):
            sum(range(20_000 * ((number + rank) % 3)))
        """,
    )
    recording_suite.write(
        "test_turns.py",
        """
        import os

        import pytest

        pytestmark = pytest.mark.distributed(2, init=False)


        @pytest.fixture
        def dies_at_once(rank):
            if rank == 0:
                os._exit(0)


        @pytest.fixture
        def fails_at_once(rank):
            assert rank == 0, "at once"


        @pytest.mark.parametrize("turn", range(2))
        class TestTurns:
            def test_passes_first(self, turn):
                pass

            def test_dies(self, dies_at_once, turn):
                pass

            def test_passes_second(self, turn):
                pass

            def test_fails(self, fails_at_once, turn):
                pass

            def test_passes_third(self, turn):
                pass

            def test_waits(self, rank, turn, gather):
                if rank == 0:
                    gather(rank)
                else:
                    pytest.skip("on this rank")
        """,
    )
    run = recording_suite.run("--accel-timeout", "60")
    words = {"passes_first": "PASSED", "passes_second": "PASSED", "passes_third": "PASSED"}
    words |= {"dies": "ERROR", "fails": "ERROR", "waits": "FAILED"}
    run.expect(
        {
            **{f"test_uneven[{number}]": "PASSED" for number in range(30)},
            **{f"test_{name}[{turn}]": word for name, word in words.items() for turn in range(2)},
        }
    )
    assert "errors outside of any test" not in run.text
    counts = start_counts(recording_suite)
    assert set(counts.values()) == {1}
    assert {test for test in counts if "uneven" in test} == {
        f"test_uneven[{number}] {rank}" for number in range(30) for rank in range(2)
    }


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


@pytest.mark.long
def test_a_rerun_does_not_overlap_with_the_next_test(recording_suite: BackgroundSuite) -> None:
    """The test fails in the driver only, after its ranks have finished it."""
    recording_suite.write(
        "test_it.py",
        """
        import os
        from pathlib import Path

        import pytest

        pytestmark = pytest.mark.distributed(2, init=False)


        @pytest.mark.flaky(reruns=1)
        def test_again():
            pass


        def test_next():
            pass


        @pytest.mark.flaky(reruns=1)
        def test_dies_once(rank):
            if rank == 1 and not Path("died").exists():
                Path("died").touch()
                os._exit(0)
        """,
    )
    recording_suite.write(
        "driver.py",
        """
        import os

        import pytest

        failed = []

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_teardown(item):
            result = yield
            if "RANK" not in os.environ and item.name == "test_again" and not failed:
                failed.append(item)
                assert False, "in the driver"
            return result
        """,
    )
    run = recording_suite.run("-p", "driver", "-p", "rerunfailures", CAUSES)
    assert "2 rerun" in run.text
    assert run.ret == 0, run.text
    numbers = {"test_again": 2, "test_next": 1, "test_dies_once": 2}
    assert start_counts(recording_suite) == {f"{test} {rank}": n for test, n in numbers.items() for rank in range(2)}
    # The junit file has a case for each attempt. The one that passed has no cause of the one that did not.
    cases = ElementTree.parse(recording_suite.path / "causes.xml").findall(".//testcase[@name='test_dies_once']")
    assert ["accel_cause" in ElementTree.tostring(case, "unicode") for case in cases] == [True, False]


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
