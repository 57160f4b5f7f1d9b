"""Tests of ``--accel-retry-dead``: a test is retried if its world died for a reason outside of the test."""

from __future__ import annotations

import contextlib
import re
import uuid
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.background_suite import BackgroundSuite
    from tests.run import Run

_HEADLINE = "accel: retried, since the world died (--accel-retry-dead)"
_SERVER_LOST = "ended with the fork server, which is gone"
_TESTS = """
    import os
    import signal
    from pathlib import Path

    import psutil
    import pytest

    pytestmark = pytest.mark.distributed(2)


    def first_time(name):
        try:
            Path(__file__).with_name(name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


    def lose_the_server(rank, name):
        import torch.distributed as dist

        dist.barrier()  # else the other rank may be a phase behind, and that is what would be told
        if rank == 0 and first_time(name):
            end_the_server()
        dist.barrier()


    def end_the_server():
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()


    @pytest.fixture
    def lost_in_setup(rank):
        lose_the_server(rank, "setup")


    @pytest.fixture
    def lost_in_teardown(rank):
        yield
        lose_the_server(rank, "teardown")


    def test_setup(lost_in_setup):
        pass


    def test_call(rank):
        import torch
        import torch.distributed as dist

        lose_the_server(rank, "call")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2


    def test_teardown(lost_in_teardown):
        pass


    def test_skips_before_the_teardown(lost_in_teardown):
        pytest.skip("not now")


    def test_subtests_in_call(subtests, rank):
        with subtests.test("fails once"):
            assert not first_time(f"rank-{rank}")
        lose_the_server(rank, "subtests")


    def test_subtests_before_teardown(subtests, lost_in_teardown):
        with subtests.test("passes"):
            pass


    def test_fails_the_second_time(rank):
        lose_the_server(rank, "fails")
        assert rank == 0


    def test_each_time(rank):
        import torch.distributed as dist

        dist.barrier()
        if rank == 0:
            end_the_server()
        dist.barrier()


    def test_own_fault(rank):
        import torch.distributed as dist

        assert rank == 0 or first_time("own-fault"), "was retried"
        if rank == 1:
            os._exit(0)
        dist.barrier()
"""


def test_a_test_is_retried_if_the_fork_server_dies(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", _TESTS)
    phases = {"test_setup": " in the setup phase", "test_call": "", "test_teardown": " in the teardown phase"}
    run = suite.run("--accel-retry-dead", "-k", " or ".join(phases), "--junitxml=report.xml")
    run.expect(dict.fromkeys(phases, "PASSED"))
    reasons = {test: f"ranks 0-1 {_SERVER_LOST}{phase} (the fork server was lost)" for test, phase in phases.items()}
    assert _retried_tests(run) == reasons
    cases = xml.etree.ElementTree.parse(suite.path / "report.xml").findall(".//testcase")
    recorded = {
        case.get("name"): [found.get("value") for found in case.findall(".//property[@name='accel_retried']")]
        for case in cases
    }
    assert recorded == {test: [reason] for test, reason in reasons.items()}


@pytest.mark.long
def test_the_result_of_the_retry_counts(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", _TESTS)
    expected_texts = {
        "test_fails_the_second_time": "AssertionError",
        "test_each_time": f"ranks 0-1 {_SERVER_LOST}",
        "test_own_fault": "rank 1 exited with status 0",
    }
    run = suite.run("--accel-retry-dead", "-k", " or ".join(expected_texts))
    run.expect(dict.fromkeys(expected_texts, "FAILED"))
    for test, text in expected_texts.items():
        assert text in run.failure(test)
    assert set(_retried_tests(run)) == expected_texts.keys() - {"test_own_fault"}


def _retried_tests(run: Run) -> dict[str, str]:
    """Return the tests that the summary lists as retried, with the reason of each."""
    return dict(re.findall(r"^test_it\.py::(\w+): (.*)$", run.text.partition(_HEADLINE)[2], re.MULTILINE))


@pytest.mark.long
def test_a_skipped_test_is_not_retried_after_its_teardown(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", _TESTS)
    run = suite.run("--accel-retry-dead", "-k", "test_skips_before_the_teardown")
    run.expect({"test_skips_before_the_teardown": "SKIPPED ERROR"})
    assert _HEADLINE not in run.text


@pytest.mark.long
@pytest.mark.skipif(pytest.version_tuple < (9,), reason="needs pytest's subtests")
@pytest.mark.parametrize("phase", ["in_call", "before_teardown"])
def test_each_subtest_of_a_retried_test_is_reported_once(suite: BackgroundSuite, phase: str) -> None:
    suite.write("test_it.py", _TESTS)
    run = suite.run("--accel-retry-dead", "-k", f"test_subtests_{phase}")
    assert run.result(f"test_subtests_{phase}") == "SUBPASSED PASSED"
    assert len(_retried_tests(run)) == 1


@pytest.mark.long
def test_without_the_option_the_death_is_reported_and_not_retried(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", _TESTS)
    run = suite.run("-k", "test_call or test_own_fault")
    run.expect({"test_call": "FAILED", "test_own_fault": "FAILED"})
    assert _SERVER_LOST in run.failure("test_call")
    assert _HEADLINE not in run.text


@pytest.fixture
def limited_memory() -> Iterator[Path]:
    """Provide a control group that is limited to 1.5 GB: the kernel kills processes that exceed this together."""
    roots = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
    for root, limit in roots.items():
        group = root / f"accel-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(1_500_000_000))
                with contextlib.suppress(OSError):  # Not every machine has this file, and not every one needs it.
                    (group / "memory.swap.max").write_text("0")
                yield group
            finally:
                group.rmdir()
            return
    pytest.skip("cannot create a control group: not root, or no memory controller")


@pytest.mark.long
def test_an_out_of_memory_kill_is_reported_and_retried(suite: BackgroundSuite, limited_memory: Path) -> None:
    suite.write(
        "test_it.py",
        """
        from pathlib import Path

        import pytest


        @pytest.mark.distributed(2)
        def test_wants_too_much(rank):
            import torch
            import torch.distributed as dist

            if rank == 1:
                with Path(__file__).with_name("times").open("a") as times:
                    times.write("x")
                if len(Path(__file__).with_name("times").read_text()) == 1:
                    kept = [torch.ones(1 << 26) for _ in range(20)]
            dist.barrier()
        """,
    )
    suite.control_group = limited_memory
    run = suite.run("--accel-retry-dead")
    run.expect({"test_wants_too_much": "PASSED"})
    assert (
        "test_it.py::test_wants_too_much: rank 1 was killed by SIGKILL: out of memory (the "
        "oom_kill counter of the control group went up) (a rank was killed: out of memory)"
    ) in run.text
    assert (suite.path / "times").read_text() == "xx"
